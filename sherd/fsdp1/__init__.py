"""FSDP1's front end: the wrapper `FullyShardedDataParallel`, its arguments, state dicts and flat parameters.

The core does not import it: `sherd.FullyShardedDataParallel` loads it.
"""
