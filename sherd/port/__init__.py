"""Help for programs that move from FSDP1 to `fully_shard`."""
