"""Adapters for torch's pipeline schedules, and for packages that check for torch's FSDP by isinstance."""

from sherd.interop.identity import torch_fsdp_identity

__all__ = ["torch_fsdp_identity"]
