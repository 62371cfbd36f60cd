"""WHEN each unit's parameters and gradients move: events in, actions out. No tensors, no streams, no ranks talking."""
