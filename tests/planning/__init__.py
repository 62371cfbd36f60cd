"""What a step takes, and how it is shown."""
