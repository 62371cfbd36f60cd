"""WHAT OTHERS ASK FOR: torch's pipeline schedules, and what packages check by isinstance. Off until asked for."""

from sherd.interop.identity import torch_fsdp_identity

__all__ = ["torch_fsdp_identity"]
