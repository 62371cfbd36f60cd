"""Sums that no order changes: for norms and means with the same bits on any number of ranks.

Each value becomes a whole number of units, two numbers of 28 bits each, of which integer sums are exact. The unit is
relative to the largest magnitude on all ranks. So a value counts the same wherever it is, and a sum of n values is off
by at most n * 2**-57 of the largest. After Demmel and Nguyen, "Parallel Reproducible Summation" (2015).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_BITS = 28  # so that int64 holds the sum of 2**35 values
_CHUNK, _CHUNK_ON_HOST = 1 << 24, 1 << 16  # elements that are widened at once; on a CPU as many as its cache holds


class ExactSum:
    """The unit of sums of values of at most `largest`, float64, on any device: one number, or one for each sum."""

    def __init__(self, largest: torch.Tensor) -> None:
        self._largest = largest
        # Values below 2**-900 count as nothing, since the factor has to be finite.
        self._exponent = torch.frexp(largest.nan_to_num(0.0, 0.0, 0.0)).exponent.clamp(min=-900)
        self._factor = torch.ldexp(torch.ones_like(largest), _BITS - self._exponent)

    def parts(self, shards: Sequence[torch.Tensor], power: int, index: int | None = None) -> torch.Tensor:
        """Returns the sum of `|value| ** power` of all elements of `shards` in units, `[2]`, int64.

        `power` is 1 or 2. `index`: of the sum, if there are several. Add the parts of all ranks.
        """
        factor = self._factor if index is None else self._factor[index]
        total = torch.zeros(2, dtype=torch.int64, device=factor.device)
        for shard in shards:
            for chunk in shard.reshape(-1).split(_CHUNK_ON_HOST if shard.device.type == "cpu" else _CHUNK):
                if chunk.is_complex():
                    wide = torch.view_as_real(chunk).double().square().sum(-1)
                    wide = wide if power == 2 else wide.sqrt_()
                else:
                    wide = chunk.to(torch.float64, copy=True)
                    wide = wide.square_() if power == 2 else wide.abs_()
                wide.mul_(factor.to(wide.device))
                whole = wide.round()
                wide.sub_(whole).mul_(2.0**_BITS).round_()
                # Whole numbers, of which float64 holds the sum of a chunk. If one is not finite, `total` drops them.
                total += torch.stack([whole.sum(), wide.sum()]).to(total.device, torch.int64)
        return total

    def total(self, parts: torch.Tensor) -> torch.Tensor:
        """Returns the sums of which all ranks' `parts`, `[..., 2]`, were added; inf or nan if a value was that."""
        units = parts[..., 0].double() + parts[..., 1].double() * 2.0**-_BITS
        return torch.where(self._largest.isfinite(), torch.ldexp(units, self._exponent - _BITS), self._largest)


def sum_over_ranks(values: torch.Tensor) -> float:
    """Returns the sum of all ranks' `values`, 1-D, which are finite and not negative. Collective over all ranks."""
    largest = values.amax()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    exact = ExactSum(largest.cpu().double())  # some devices have no float64
    parts = exact.parts([values.cpu()], 1).to(values.device)
    dist.all_reduce(parts)
    return float(exact.total(parts.cpu()))
