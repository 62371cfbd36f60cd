"""Checkpoints as files, without torch and without ranks: their content, and how they are written, found and read."""
