"""DTensors whose pieces are runs of elements instead of equal chunks."""
