"""Checkpoints as files, without torch and without ranks: what is in them, and how they are written, found and read."""
