"""Every strategy, however it is spelt, is plain training with its pieces elsewhere."""
