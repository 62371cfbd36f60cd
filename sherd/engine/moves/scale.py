"""The factors by which a sum of gradients over the ranks becomes their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MANY_RANKS = 8
"""From this many on a shard is so small that scaling it costs nothing."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors that turn a sum over ranks into the mean: one for each gradient on its way in, one for the sum."""

    before: float
    after: float

    @classmethod
    def for_(cls, dtype: torch.dtype, divide_by: float) -> Scale:
        """In float32 and wider all of it goes in front, where it is free. Narrow types:

        bfloat16 has float32's range, so the sum is divided after it was widened. float16 overflows on sums and
        underflows on quotients: half of the factor (a power of two, hence exact) in front and the rest behind.
        """
        if dtype.itemsize >= 4:
            return cls(1 / divide_by, 1.0)
        if dtype == torch.float16:
            front = 2.0 ** math.floor(math.log2(divide_by) / 2)
            return cls(1 / front, front / divide_by)
        return cls(1.0, 1 / divide_by)


def add_earlier(reduced: torch.Tensor, earlier: torch.Tensor | None) -> None:
    """Earlier sums are as wide as the shards; on the wire goes what a single one would."""
    if earlier is not None:
        reduced.copy_(earlier.add_(reduced))
