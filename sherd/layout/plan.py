"""The plan: where all tensors of a group are cut into runs, so that the ranks' shares balance.

In the drawings a letter stands for 16 elements and `.` for padding; `|` stands between tensors.

Consecutive (`Flat`, `Blocks`): the tensors stand in one line, matrices first, and the line is cut into equal shares. A
gap before a tensor makes the cut fall between two of its blocks. 2 ranks; a (4, 48) and b (1, 64) in blocks of one row,
c (80,) anywhere; without the gap the cut would fall within a row of a:

    rank 0 | b b b b | . | a a a a a a |
    rank 1 | a a a a a a | c c c c c |

Where equal shares would take more padding than `MOST_PADDING`, there are no gaps, and the shares are as unequal as the
blocks make them. 3 ranks; a (3, 64) and b (2, 80) in blocks of one row:

    rank 0 | b b b b b |
    rank 1 | b b b b b | a a a a |
    rank 2 | a a a a a a a a |

Owned (`Owned`): largest tensor first, each to the owner that has least of the group so far (longest processing time,
Graham 1969). Then the owner with most of this group becomes the rank with least of all other groups. 2 ranks, of which
rank 0 owns more elsewhere; a (5, 16), b (4, 16), c (2, 16):

    rank 0 | a a a a a | . |
    rank 1 | b b b b | c c |
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm, prod

from sherd.layout.extent import aligned
from sherd.layout.packing import MOST_PADDING, UNSHARDED_ALIGNMENT, even_share
from sherd.layout.placement import Shape
from sherd.layout.runs import RunPlacement, Runs, whole_on

CANDIDATES = 16
"""The number of equal shares to try for each unit of their length."""

FINE = 64
"""Cuts are aligned if a share has at least this many places for aligned cuts."""


@dataclass(frozen=True, slots=True)
class Wanted:
    shape: Shape
    placement: RunPlacement
    name: str


def plan(wanted: Sequence[Wanted], num_ranks: int, loads: Sequence[int] | None = None) -> tuple[Runs, ...]:
    """Returns the cuts of all tensors of a group, in their order; the same on every rank.

    `loads` are the elements that each rank owns of other groups: the owners that are chosen here balance them.
    """
    owned = {each.placement.owned for each in wanted}
    assert len(owned) == 1, "tensors that are cut and tensors that are not have groups of their own"
    return _owned(wanted, num_ranks, loads or [0] * num_ranks) if owned.pop() else _consecutive(wanted, num_ranks)


def _runs(each: Wanted, num_ranks: int, first: int, ends: Sequence[int]) -> Runs:
    return Runs(each.shape, num_ranks, first, tuple(ends), each.placement.by_rows(each.shape))


# Owned


def _owned(wanted: Sequence[Wanted], num_ranks: int, loads: Sequence[int]) -> tuple[Runs, ...]:
    # The group is balanced first, since all ranks wait for the rank that owns most of it; then the ranks' sums.
    numels = [prod(each.shape) for each in wanted]
    owners = _balanced(numels, num_ranks)
    has = [0] * num_ranks
    for numel, owner in zip(numels, owners, strict=True):
        has[owner] += numel
    fullest_first = sorted(range(num_ranks), key=lambda owner: -has[owner])
    idlest_first = sorted(range(num_ranks), key=lambda rank: loads[rank])
    ranks = dict(zip(fullest_first, idlest_first, strict=True))
    return tuple(whole_on(ranks[owner], each.shape, num_ranks) for each, owner in zip(wanted, owners, strict=True))


def _balanced(numels: Sequence[int], num_owners: int) -> list[int]:
    heap = [(0, owner) for owner in range(num_owners)]
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owned, owners[index] = heap[0]
        heapq.heapreplace(heap, (owned + numels[index], owners[index]))
    return owners


# Consecutive


def _consecutive(wanted: Sequence[Wanted], num_ranks: int) -> tuple[Runs, ...]:
    order, line = _line_of(wanted, num_ranks)
    starts, bounds = line.cut_evenly() or line.cut_unevenly()
    cuts: dict[int, Runs] = {}
    for index, start, numel in zip(order, starts, line.numels, strict=True):
        first = min(bisect_right(bounds, start), num_ranks - 1)
        last = min(bisect_right(bounds, start + max(numel, 1) - 1), num_ranks - 1)
        cuts[index] = _runs(wanted[index], num_ranks, first, [bound - start for bound in bounds[first:last]] + [numel])
    return tuple(cuts[index] for index in range(len(wanted)))


def _line_of(wanted: Sequence[Wanted], num_ranks: int) -> tuple[list[int], _Line]:
    """Returns the order of the tensors in the line, and the line."""
    grains = [each.placement.grain(each.shape, each.name) for each in wanted]
    # Matrices come before vectors, so that tensors that optimizers treat alike are neighbours; then large blocks first.
    order = sorted(range(len(wanted)), key=lambda index: (len(wanted[index].shape) < 2, -grains[index]))
    return order, _Line([prod(wanted[at].shape) for at in order], [grains[at] for at in order], num_ranks)


Cuts = tuple[list[int], list[int]]
"""The start of each tensor of a line, and the end of each rank's run."""


@dataclass(frozen=True)
class _Line:
    """Aligned tensors, one after the other. Tensor i has `numels[i]` elements, cut at multiples of `grains[i]`."""

    numels: list[int]
    grains: list[int]
    num_ranks: int

    @cached_property
    def starts(self) -> list[int]:
        """The start of each tensor if there are no gaps, then the end of the line."""
        return list(accumulate((aligned(numel, UNSHARDED_ALIGNMENT) for numel in self.numels), initial=0))

    @property
    def total(self) -> int:
        return self.starts[-1]

    @cached_property
    def share(self) -> int:
        """The length of the shortest equal runs; above zero, also for a group without elements."""
        return even_share(max(1, self.total), self.num_ranks)

    @cached_property
    def aligned_grains(self) -> list[int]:
        return [lcm(grain, UNSHARDED_ALIGNMENT) for grain in self.grains]

    # Equal shares

    def cut_evenly(self) -> Cuts | None:
        """Returns the cuts into the smallest equal shares. None: they take too much padding."""
        for share in self._shares():
            starts = self._starts_for(share)
            if starts is not None:
                return starts, [share * (rank + 1) for rank in range(self.num_ranks)]
        return None

    def _shares(self) -> list[int]:
        """Returns the lengths of equal shares to try. A tensor on three ranks or more needs a multiple of its grain."""
        most = int(self.share * (1 + MOST_PADDING))
        long = lcm(
            UNSHARDED_ALIGNMENT, *(g for g, n in zip(self.aligned_grains, self.numels, strict=True) if n > 2 * most)
        )
        shares = {self.share}
        for unit in (long, lcm(*self.aligned_grains)):
            multiples = range(aligned(self.share, unit), most + 1, unit)
            shares.update(multiples[:: max(1, len(multiples) // CANDIDATES)])
        return sorted(shares)

    def _starts_for(self, share: int) -> list[int] | None:
        """Returns the start of each tensor, with gaps that allow cuts at multiples of `share`. None: no gaps do."""
        starts, cursor = [], 0
        for numel, grain in zip(self.numels, self.aligned_grains, strict=True):
            room = share - cursor % share
            if numel > room:
                cursor += room % grain
                before_the_cut = room - room % grain
                if numel - before_the_cut > share and share % grain:
                    return None
            starts.append(cursor)
            cursor = aligned(cursor + numel, UNSHARDED_ALIGNMENT)
        return starts if cursor <= share * self.num_ranks else None

    # Unequal shares

    def cut_unevenly(self) -> Cuts:
        """Returns the cuts without gaps for which the longest run is the shortest possible, to the thousandth."""
        blocks = [min(pair) for pair in zip(self.steps, self.numels, strict=True)]
        low = max(self.share, *blocks)
        high = low + self.share + UNSHARDED_ALIGNMENT
        best = self._bounds_for(high)
        while high - low > low // 1000:
            middle = (low + high) // 2
            bounds = self._bounds_for(middle)
            best, low, high = (best, middle + 1, high) if bounds is None else (bounds, low, middle)
        assert best is not None, "runs as long as a share and a block together hold everything"
        return self.starts[:-1], best

    def _bounds_for(self, longest: int) -> list[int] | None:
        """Returns the ends of runs of at most `longest` elements. None: there are no such runs."""
        shares = [self.total * rank // self.num_ranks for rank in range(1, self.num_ranks + 1)]
        full = [self.total] * self.num_ranks
        return self._bounds_near(shares, longest) or self._bounds_near(full, longest)

    def _bounds_near(self, aims: list[int], longest: int) -> list[int] | None:
        """Returns ends of runs at the first cuts from `aims` on, or earlier for long runs. None: the line is longer."""
        bounds, bound = [], 0
        for aim in aims:
            bound = min(self._cut_at_most(bound + longest), self._cut_at_least(aim))
            bounds.append(bound)
        return bounds if bound == self.total else None

    @cached_property
    def steps(self) -> list[int]:
        """The elements from one allowed cut of each tensor to the next."""
        return [
            fine if fine * FINE <= self.share else grain
            for grain, fine in zip(self.grains, self.aligned_grains, strict=True)
        ]

    def _cut_at_most(self, place: int) -> int:
        """Returns the last allowed cut up to `place`. It may be in the gap between a tensor and the next one."""
        if place >= self.total:
            return self.total
        at = bisect_right(self.starts, place) - 1
        return place - (place - self.starts[at]) % self.steps[at]

    def _cut_at_least(self, place: int) -> int:
        """Returns the first allowed cut from `place` on."""
        if place >= self.total:
            return self.total
        at = bisect_right(self.starts, place) - 1
        blocks = -(-(place - self.starts[at]) // self.steps[at])
        inside = blocks * self.steps[at] < self.numels[at]
        return self.starts[at] + blocks * self.steps[at] if inside else self.starts[at + 1]
