"""DTensors whose pieces are runs of elements instead of equal chunks."""

# Each of these enters what it answers into the table of operations.
from sherd.tensor import chunks, elementwise, operands, optimizers, pairs, reductions

__all__ = ["chunks", "elementwise", "operands", "optimizers", "pairs", "reductions"]
