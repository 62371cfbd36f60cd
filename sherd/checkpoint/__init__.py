"""Checkpoints of optimizers: their state by the names of parameters, unsharded or in parts."""
