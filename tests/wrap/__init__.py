"""Which modules become units, and whether they train."""
