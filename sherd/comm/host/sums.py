"""The sum of the ranks' parts, added up in rank order, so that it has the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from sherd.errors import CommError

Add = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Adds parts up in rank order, into a buffer or onto it."""

# Sums of more than one pass are made in blocks of this many elements, which stay in the cache.
_BLOCK = 1 << 16


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which `dtype` is added up: float32 for bfloat16 and float16, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@cache
def can_add(dtype: torch.dtype) -> bool:
    try:
        one = torch.zeros(1, dtype=dtype)
        torch.add(one, one)
    except RuntimeError:
        return False
    return True


def addable(dtype: torch.dtype) -> torch.dtype:
    """Returns `dtype`. Raises CommError if torch cannot add it."""
    if not can_add(dtype):
        raise CommError(f"torch cannot add up {dtype} on a CPU; reduce in another dtype")
    return dtype


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Fill `out` with the sum of `parts`, in rank order, all 1-D and equally long. `out` may be one of them."""
    wide = sum_dtype(parts[0].dtype)
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if len(parts) == 2 and out.dtype == parts[0].dtype == wide:
        torch.add(parts[0], parts[1], out=out)
        return
    # A total of another dtype, or over the memory of a summand, is made aside and copied out block by block.
    aside = None
    memory = out.untyped_storage().data_ptr()
    if out.dtype != wide or any(part.untyped_storage().data_ptr() == memory for part in parts):
        aside = torch.empty(min(_BLOCK, out.numel()), dtype=wide)
    for start in range(0, out.numel(), _BLOCK):
        into = out[start : start + _BLOCK]
        total = into if aside is None else aside[: into.numel()]
        total.copy_(parts[0][start : start + _BLOCK])
        for part in parts[1:]:
            total.add_(part[start : start + _BLOCK])
        if aside is not None:
            into.copy_(total)


def add_onto(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add `parts` to `out`, whose dtype is at least as wide, in their order."""
    for start in range(0, out.numel(), _BLOCK):
        into = out[start : start + _BLOCK]
        for part in parts:
            into.add_(part[start : start + _BLOCK])


def collect(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Put `parts` into the rows of `out`."""
    for row, part in zip(out, parts, strict=True):
        row.copy_(part)
