"""`sherd train`, a reference trainer: one readable way from text to a sharded language model."""
