"""What does sharding cost? `python -m bench` measures sherd beside plain torch, DDP, FSDP1 and FSDP2."""
