"""The making of a unit."""
