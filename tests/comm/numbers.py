"""Numbers that ranks send each other in these tests, and their plain sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch import Tensor

SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
GATHERED = [*SUMMED, torch.bool, torch.int8, torch.uint64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


def numbers(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=generator) * 50
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator, dtype=torch.float64) * 50).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 50, (count,), generator=generator).to(dtype)


def added_up(tensors: Sequence[Tensor]) -> Tensor:
    """The plain sum in rank order, of halves in float32."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(wide, copy=True)
    for each in tensors[1:]:
        total += each.to(wide)
    return total


EXACT = {"rtol": 0.0, "atol": 0.0}


def rounding(dtype: torch.dtype) -> dict[str, float]:
    """How far a sum in another order may be from `added_up`; torch rounds each of its partial sums of halves."""
    if dtype in (torch.bfloat16, torch.float16):
        return {"rtol": 0.02, "atol": 2.0}
    return {"rtol": 1e-5, "atol": 1e-3} if dtype.is_floating_point or dtype.is_complex else EXACT


def splits(size: int) -> Iterator[list[int]]:
    """How long each rank's part is: even, one element, one rank's only, none at all, and at random."""
    yield [5] * size
    yield [1] * size
    yield [0] * size
    yield [1] + [0] * (size - 1)
    yield [0] * (size - 1) + [7]
    random = Random(size)
    for _ in range(6):
        yield [random.choice([0, 1, random.randrange(100), random.randrange(5000)]) for _ in range(size)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
