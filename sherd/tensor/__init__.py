"""DTensors whose pieces are runs of elements instead of equal chunks."""

# Each of these enters what it answers into the table of operations.
from sherd.tensor import elementwise, filling, lists, owned, pairs, reductions, states

__all__ = ["elementwise", "filling", "lists", "owned", "pairs", "reductions", "states"]
