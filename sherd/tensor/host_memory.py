"""The bytes of tensors in host memory."""

from __future__ import annotations

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host; it lives as long as the view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "its memory is contiguous and on the host"
    # Not by numpy, which torch works without, and which has no bfloat16 or float8.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.of = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
