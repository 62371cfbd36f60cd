"""The packing: the places of a group's tensors in its buffers. One record of offsets, checked when it is made.

Three buffers share one packing. Tensors cut by themselves (`Shard`; 2 ranks, tensors a and b, `|` between slots, `.`
for padding):

    shard buffer        rank r's shards, 1-D, which the optimizer owns       | a_r | b_r . |
    rows                all ranks' shard buffers side by side: the output    | a_0 | b_0 . |
                        of an all-gather, the input of a reduce-scatter      | a_1 | b_1 . |
    unsharded buffer    every tensor in its own order, 1-D                   | a_0 a_1 | b_0 . b_1 . |

If the padded shards of a tensor, one after the other, keep the tensor in order (`Cut.in_order`), the unsharded buffer
has the padding too, so that one strided copy per tensor turns the rows into the unsharded buffer.

Tensors cut into runs (`Flat`, `Blocks`, `Owned`): the rows are the unsharded buffer, and nothing has to be copied. A
tensor that crosses from one rank to the next is the last of the one and the first of the other; padding is between
tensors only. 3 ranks; `Flat` tensors a (128,), b (80,), c (48,), a letter for 16 elements:

    buffer | a a a a a a a a | b b b b b | c c c | . . |
    rank 0 | a a a a a a |
    rank 1 | a a | b b b b |
    rank 2 | b | c c c | . . |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from sherd.layout.extent import Extent, aligned
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs

UNSHARDED_ALIGNMENT = 16
"""Unsharded tensors start at multiples of 16 elements. Kernels want 16 bytes, and an element may be a single byte."""

SHARD_ALIGNMENT = 4
"""Shards start at multiples of 4 elements, 16 bytes in float32, unless they are shorter than `SHORT`: on thousands of
ranks a shard is a few elements, and gaps between shards would make the collectives several times larger."""

SHORT = 16

MOST_PADDING = 0.03
"""Runs are made equally long, which makes some collectives faster, if they are longer than the shortest possible equal
runs by no more than this share."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor in the shard buffer of the first rank that holds some of it, and in the unsharded buffer.

    Both extents include the padding of a tensor that is cut by itself, which has the same place in every rank's shard
    buffer.
    """

    cut: Cut
    shard: Extent
    unsharded: Extent

    def held(self, rank: int) -> Extent:
        """Returns the extent of the tensor's elements in `rank`'s shard buffer, without padding."""
        # A run that goes on from the rank before is first in the rank's buffer.
        goes_on = self.cut.in_line and rank != self.cut.first
        return Extent(0 if goes_on else self.shard.start, self.cut.local_numel(rank))


@dataclass(frozen=True)
class Packing:
    """The slots of a group, in the order of its tensors, and the lengths of its buffers.

    Rank r's shard buffer has `shard_numels[r]` elements, the unsharded buffer `unsharded_numel`.
    """

    num_ranks: int
    slots: tuple[Slot, ...]
    shard_numels: tuple[int, ...]
    unsharded_numel: int

    def __post_init__(self) -> None:
        assert len(self.shard_numels) == self.num_ranks, "every rank has a shard buffer"
        assert self.unsharded_numel % self.num_ranks == 0, (
            "the unsharded buffer must divide by the ranks, to be resharded"
        )
        _check_apart([slot.unsharded for slot in self.slots], self.unsharded_numel, "unsharded")
        if self.is_cut_into_runs:
            self._check_runs()
        else:
            self._check_pieces()

    def _check_pieces(self) -> None:
        assert self.is_even, "tensors cut by themselves take the same room on every rank"
        _check_apart([slot.shard for slot in self.slots], self.shard_numels[0], "shard")
        for slot in self.slots:
            cut = slot.cut
            assert slot.shard.numel >= cut.slot, f"the shard of a tensor of shape {cut.shape} is too short"
            assert slot.unsharded.numel >= cut.unsharded_numel, (
                f"the unsharded extent of a tensor of shape {cut.shape} is too short"
            )

    def _check_runs(self) -> None:
        assert self.unsharded_numel >= self.gathered_numel, "the ranks' runs are the unsharded buffer"
        for slot in self.slots:
            cut = slot.cut
            assert slot.unsharded.numel == cut.numel, f"a tensor of shape {cut.shape} is in the buffer as it is"
            begin = 0
            for rank, end in zip(cut.holders, cut.ends, strict=True):
                start = slot.unsharded.start + begin - self.starts[rank]
                is_there = start == (slot.shard.start if rank == cut.first else 0)
                inside = is_there and start + end - begin <= self.shard_numels[rank]
                assert begin == end or inside, f"rank {rank} holds {begin} to {end} of {slot}, outside its run"
                begin = end

    @property
    def is_cut_into_runs(self) -> bool:
        return bool(self.slots) and self.slots[0].cut.in_line

    @cached_property
    def is_even(self) -> bool:
        return len(set(self.shard_numels)) <= 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return _starts(self.shard_numels)

    @cached_property
    def gathered_numel(self) -> int:
        return sum(self.shard_numels)

    @cached_property
    def direct(self) -> bool:
        """True if the rows are the first bytes of the unsharded buffer, so that an all-gather may write into it."""
        if self.is_cut_into_runs:
            return True
        if not self.is_in_order:
            return False
        return self.num_ranks == 1 or (len(self.slots) == 1 and self.slots[0].shard.numel == self.shard_numels[0])

    @cached_property
    def is_in_order(self) -> bool:
        """True if the shards of every tensor, rank after rank, are the tensor: gathered alone it needs no copy."""
        return all(slot.cut.in_order for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[Extent, ...]:
        """The extents of the rows that belong to no tensor, rank by rank."""
        by_rank = enumerate(self.starts)
        return tuple(gap.shifted(start) for rank, start in by_rank for gap in self.gaps_of(rank))

    def gaps_of(self, rank: int) -> tuple[Extent, ...]:
        """Returns the extents of `rank`'s shard buffer that belong to no tensor."""
        held = _ordered([extent for slot in self.slots if (extent := slot.held(rank)).numel])
        starts, ends = [*(each.start for each in held), self.shard_numels[rank]], [0, *(each.stop for each in held)]
        return tuple(Extent(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    @cached_property
    def runs_together(self) -> Runs:
        """The cut of all tensors, here cut into runs, as one 1-D tensor: the rows without the padding at the end."""
        used = max(slot.unsharded.stop for slot in self.slots)
        ends = (start + numel for start, numel in zip(self.starts, self.shard_numels, strict=True))
        return Runs((used,), self.num_ranks, 0, tuple(min(end, used) for end in ends))

    @property
    def padding(self) -> float:
        """The share of the rows that is padding, 0.0 to 1.0."""
        elements = sum(slot.cut.local_numel(rank) for slot in self.slots for rank in range(self.num_ranks))
        return 1 - elements / self.gathered_numel if self.gathered_numel else 0.0

    @property
    def imbalance(self) -> float:
        """The share by which the longest shard buffer exceeds the mean, 0.0 if all are equally long."""
        return max(self.shard_numels) * self.num_ranks / self.gathered_numel - 1 if self.gathered_numel else 0.0


def _ordered(extents: list[Extent]) -> list[Extent]:
    return sorted(extents, key=lambda extent: (extent.start, extent.numel))


def _starts(shard_numels: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(shard_numels[:-1], initial=0))


def _check_apart(extents: list[Extent], size: int, which: str) -> None:
    """Assert that no two extents overlap and that none ends after the buffer of `size` elements."""
    ordered = _ordered(extents)
    for before, after in pairwise(ordered):
        assert before.stop <= after.start, f"slots overlap in the {which} buffer: {before}, {after}"
    assert not ordered or ordered[-1].stop <= size, f"a slot ends after the {which} buffer"


def pack(cuts: Sequence[Cut], num_ranks: int) -> Packing:
    """Returns a packing with few gaps. The slots are in the order of `cuts`, the tensors in the buffers are not."""
    in_line = [cut.in_line for cut in cuts]
    assert all(in_line) or not any(in_line), "tensors cut into runs have a group of their own"
    return _pack_runs(cuts, num_ranks) if any(in_line) else _pack_pieces(cuts, num_ranks)


# Tensors cut by themselves


def _pack_pieces(cuts: Sequence[Cut], num_ranks: int) -> Packing:
    # Tensors cut in order come first, since one strided copy moves them all. Among them, and among the others, slots
    # that leave the next tensor aligned come first.
    def last(index: int) -> tuple[bool, bool]:
        slot = cuts[index].slot
        return not cuts[index].in_order, slot < SHORT or slot % SHARD_ALIGNMENT != 0

    order = sorted(range(len(cuts)), key=last)
    slots: dict[int, Slot] = {}
    shard = unsharded = 0
    for index in order:
        cut = cuts[index]
        if num_ranks == 1:
            shard = unsharded  # nothing is cut, so the two buffers may be the same memory
        elif cut.slot >= SHORT:
            shard = aligned(shard, SHARD_ALIGNMENT)
        slots[index] = Slot(cut, Extent(shard, cut.slot), Extent(unsharded, cut.unsharded_numel))
        shard += cut.slot
        unsharded = aligned(unsharded + cut.unsharded_numel, UNSHARDED_ALIGNMENT)
    # A group that is resharded to k ranks cuts its unsharded buffer into k equal runs; k divides num_ranks.
    unsharded = aligned(unsharded, num_ranks)
    return Packing(num_ranks, tuple(slots[index] for index in range(len(cuts))), (shard,) * num_ranks, unsharded)


# Tensors cut into runs


def _pack_runs(cuts: Sequence[Cut], num_ranks: int) -> Packing:
    """Lay tensors rank after rank, in equally long runs if that costs little padding, else in the shortest runs."""

    # The order of the plan: a tensor that goes on to the next rank is last on its rank, matrices come before vectors.
    def place(index: int) -> tuple[int, bool, bool]:
        cut = cuts[index]
        return cut.first, len(cut.ends) > 1, len(cut.shape) < 2

    order = sorted(range(len(cuts)), key=place)
    ordered = [cuts[index] for index in order]
    starts, numels = _lay(ordered, num_ranks)
    even = _even_numel(ordered, numels)
    if even is not None:
        starts, numels = _lay_evenly(ordered, even), (even,) * num_ranks
    run_starts = _starts(numels)
    slots = {
        index: Slot(cut, Extent(start - run_starts[cut.first], cut.ends[0]), Extent(start, cut.numel))
        for index, cut, start in zip(order, ordered, starts, strict=True)
    }
    unsharded = aligned(sum(numels), num_ranks)
    return Packing(num_ranks, tuple(slots[index] for index in range(len(cuts))), numels, unsharded)


def even_share(numel: int, num_ranks: int) -> int:
    """Returns the length of the shortest `num_ranks` equal runs, with aligned starts, that hold `numel` elements."""
    return aligned(-(-numel // num_ranks), UNSHARDED_ALIGNMENT)


def _even_numel(cuts: Sequence[Cut], numels: tuple[int, ...]) -> int | None:
    """Returns the length of equal runs for these cuts. None: they are impossible or need too much padding."""
    longest = max(numels)
    # A run in the middle of a tensor cannot be padded.
    middles = (cut.ends[at] - cut.ends[at - 1] for cut in cuts for at in range(1, len(cut.ends) - 1))
    fit = all(numel % UNSHARDED_ALIGNMENT == 0 for numel in numels) and all(middle == longest for middle in middles)
    return longest if fit and longest <= even_share(sum(numels), len(numels)) * (1 + MOST_PADDING) else None


def _lay(cuts: Sequence[Cut], num_ranks: int) -> tuple[list[int], tuple[int, ...]]:
    """Returns the start of each tensor in the unsharded buffer and the length of each rank's run, padded to align."""
    starts: list[int] = []
    bounds, cursor = [0], 0
    for cut in cuts:
        bounds += [cursor] * (cut.first + 1 - len(bounds))
        starts.append(cursor)
        bounds += [cursor + end for end in cut.ends[:-1]]
        cursor = aligned(cursor + cut.numel, UNSHARDED_ALIGNMENT)
    bounds += [cursor] * (num_ranks + 1 - len(bounds))
    return starts, tuple(after - before for before, after in pairwise(bounds))


def _lay_evenly(cuts: Sequence[Cut], even: int) -> list[int]:
    """Returns the start of each tensor if every run has `even` elements.

    A tensor that goes on to the next rank is at the end of its rank's run, the others at the beginning.
    """
    starts: list[int] = []
    cursor = 0
    for cut in cuts:
        goes_on = len(cut.ends) > 1
        starts.append((cut.first + 1) * even - cut.ends[0] if goes_on else max(cursor, cut.first * even))
        cursor = aligned(starts[-1] + cut.numel, UNSHARDED_ALIGNMENT)
    return starts
