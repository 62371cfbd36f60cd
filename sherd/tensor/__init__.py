"""DTensors whose pieces are runs of elements instead of equal chunks."""

# Each of these enters what it answers into the table of operations.
from sherd.tensor import elementwise, local_step, operands, optimizers, pairs, reductions

__all__ = ["elementwise", "local_step", "operands", "optimizers", "pairs", "reductions"]
