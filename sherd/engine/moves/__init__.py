"""From shard to unsharded and back: all-gathers of weights, reductions of gradients."""
