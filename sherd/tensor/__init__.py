"""DTensors whose pieces are runs of elements instead of equal chunks."""

# Each of these enters what it answers into the table of operations.
from sherd.tensor import copies, elementwise, lists, optimizer_state, owned, pairs, reductions

__all__ = ["copies", "elementwise", "lists", "optimizer_state", "owned", "pairs", "reductions"]
