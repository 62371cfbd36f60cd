"""verify_equivalence finds the first wrong tensor, and nothing where nothing is wrong."""
