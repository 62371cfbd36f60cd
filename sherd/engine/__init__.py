"""HOW parameters and gradients move: the only place where layout, schedule and communication meet."""
