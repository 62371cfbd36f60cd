"""verify_equivalence: a check that a sharded model trains as the plain model does, and its report."""
