"""Files, without torch and without ranks: how checkpoints are written, found and read; scratch files."""
