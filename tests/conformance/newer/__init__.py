"""What trees of PyTorch newer than 2.6 test of FSDP, as programs of behaviours: part of `make conformance`."""
