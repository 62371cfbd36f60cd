"""Is every strategy, however it is spelt, plain training with its pieces elsewhere?"""
