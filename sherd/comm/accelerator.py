"""This machine's accelerator, and the backends of process groups that reach it."""

from __future__ import annotations

import torch
from torch import distributed as dist

__all__ = ["accelerator", "backend", "backend_for"]


def accelerator() -> str | None:
    """Returns the type of this machine's accelerator; None without one that collectives reach."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current is not None and backend_for(current.type) else None


def backend_for(device: str) -> str | None:
    """Returns torch's default backend of process groups on devices of this type; None without one that works."""
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        return None
    # The backend itself says which devices it serves: torch names gloo for "mps", whose tensors gloo refuses.
    serves = device in dist.Backend.backend_capability.get(backend, ())
    return backend if serves and dist.is_backend_available(backend) else None


def backend() -> str:
    """Returns the backends for this machine's devices, as `init_process_group` names them."""
    device = accelerator()
    return f"cpu:gloo,{device}:{backend_for(device)}" if device else "gloo"
