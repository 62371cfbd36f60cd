"""What helps a program move from FSDP1 to `fully_shard`."""
