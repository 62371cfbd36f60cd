"""What is the sum of the ranks' parts? Added up in rank order, so that it is the same bits wherever it is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

# Elements that are added up at once, where that takes more than one pass: they stay in the cache.
_BLOCK = 1 << 16


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `dtype` is added up: float32 for bfloat16 and float16, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@cache
def can_add(dtype: torch.dtype) -> bool:
    """Whether torch adds up this dtype on a CPU; it does not, for example, for float8."""
    try:
        one = torch.zeros(1, dtype=dtype)
        torch.add(one, one)
    except RuntimeError:
        return False
    return True


def add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Fill `out` with the sum of `parts`, by rank, all 1-D and equally long; `out` may be one of them."""
    wide = sum_dtype(parts[0].dtype)
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2 and out.dtype == parts[0].dtype == wide:
        torch.add(parts[0], parts[1], out=out)
    else:
        _add_up_in_blocks(parts, out, wide)


def _add_up_in_blocks(parts: Sequence[torch.Tensor], out: torch.Tensor, wide: torch.dtype) -> None:
    aside = None
    if out.dtype != wide or any(_same_memory(out, part) for part in parts):
        aside = torch.empty(min(_BLOCK, out.numel()), dtype=wide)
    for start in range(0, out.numel(), _BLOCK):
        into = out[start : start + _BLOCK]
        total = into if aside is None else aside[: into.numel()]
        total.copy_(parts[0][start : start + _BLOCK])
        for part in parts[1:]:
            total.add_(part[start : start + _BLOCK])
        if aside is not None:
            into.copy_(total)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
