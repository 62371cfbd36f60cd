"""PyTorch's own tests of FSDP, on sherd: `make conformance`. pytest collects nothing here."""
