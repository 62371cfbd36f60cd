"""Ranks on several machines train together, and see by name when the link between them goes."""
