"""Checkpoints of others, and sherd's own, as one list of tensors: converted, shown, compared and verified, by parts."""
