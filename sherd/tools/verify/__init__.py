"""Does a sharded model train as the plain one does? `verify_equivalence` and its report."""
