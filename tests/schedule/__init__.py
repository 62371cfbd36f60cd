"""Does every event get the right actions? No tensors in these files."""
