"""DTensors whose shards are runs of elements instead of equal chunks."""
