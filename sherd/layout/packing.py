"""How a group's tensors lie in its buffers: one record of offsets, checked when it is made. Integers only.

Three buffers share one packing. Tensors cut per tensor (`Shard`; 2 ranks, tensors a and b, `|` between slots, `.` for
padding):

    rest     rank r's shards, 1-D, what the optimizer owns             | a_r | b_r . |
    rows     what the ranks' shard buffers become side by side:         | a_0 | b_0 . |
             the gathered, and the to-be-scattered, form               | a_1 | b_1 . |
    whole    every tensor in its own order, 1-D                        | a_0 a_1 | b_0 . b_1 . |

In the unsharded buffer a tensor takes its padded pieces one after the other where that keeps it in order
(`Cut.in_order`), so that one strided copy per tensor turns rows into whole.

Tensors cut into runs (`Flat`, `Blocks`, `Owned`): the rows are the unsharded buffer, and nothing has to be copied. A
tensor that goes on where a rank's run ends is the last of that rank and the first of the next; padding lies between
tensors only. 3 ranks; `Flat` tensors a (128,), b (80,), c (48,), a letter for 16 elements:

    whole  | a a a a a a a a | b b b b b | c c c | . . |
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
"""Whole tensors start at multiples of this many elements: 16 bytes, which kernels want, even at one byte per
element."""

SHARD_ALIGNMENT = 4
"""Shards do so at multiples of this many, 16 bytes in float32, unless they are shorter than `SHORT`: with thousands of
ranks a shard is a few elements, and gaps between those would make the collectives several times larger."""

SHORT = 16

MOST_PADDING = 0.03
"""Runs are made equally long, which some collectives are faster for, where they then exceed the least equal ones by no
more than this share."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor cut per tensor lies: its extent in every rank's shard buffer, and in the unsharded buffer;
    padding included."""

    cut: Cut
    shard_buffer: Extent
    unsharded: Extent

    def held(self, rank: int) -> Extent:
        """The elements of `rank`'s shard buffer that are the tensor's own, without padding."""
        return Extent(self.shard_buffer.start, self.cut.local_numel(rank))


@dataclass(frozen=True, slots=True)
class RunSlot:
    """Where one tensor cut into runs lies in the unsharded buffer. `starts`: where each rank's part of that begins."""

    cut: Runs
    unsharded: Extent
    starts: tuple[int, ...]

    def held(self, rank: int) -> Extent:
        """The elements of `rank`'s shard buffer that are the tensor's."""
        piece = self.cut.piece(rank)
        return (
            Extent(self.unsharded.start + piece.start - self.starts[rank], piece.numel) if piece.numel else Extent(0, 0)
        )


@dataclass(frozen=True)
class Packing:
    """All slots of a group, in the order of its tensors, and the sizes of its buffers.

    `shard_numels[r]` is the length of rank r's shard buffer; `unsharded_numel` the unsharded buffer's.
    """

    num_ranks: int
    slots: tuple[Slot | RunSlot, ...]
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
            self._check_strips()

    def _check_strips(self) -> None:
        assert self.is_even, "tensors cut per tensor take the same room on every rank"
        _check_apart([slot.shard_buffer for slot in self._strips], self.shard_numels[0], "shard")
        for slot in self._strips:
            cut = slot.cut
            rows = self.num_ranks if cut.dim is None else cut.shape[cut.dim]
            assert cut.num_rows_held == rows, f"some row of a tensor of shape {cut.shape} has no owner, or two"
            assert cut.dim is None or cut.is_consecutive, f"rows of a tensor of shape {cut.shape} are out of order"
            assert slot.shard_buffer.numel >= cut.slot, f"the shard slot of a tensor of shape {cut.shape} is too short"
            assert slot.unsharded.numel >= cut.unsharded_numel, (
                f"the unsharded slot of a tensor of shape {cut.shape} is too short"
            )

    def _check_runs(self) -> None:
        assert self.unsharded_numel >= self.gathered_numel, "the ranks' runs are the unsharded buffer"
        for slot in self._runs:
            assert slot.starts == self.starts, "a slot counts from where the ranks' runs begin"
            assert slot.unsharded.numel == slot.cut.numel, f"a tensor of shape {slot.cut.shape} lies there as it is"
            for rank in slot.cut.holders:
                piece = slot.cut.piece(rank)
                start = slot.unsharded.start + piece.start
                inside = (
                    self.starts[rank] <= start and start + piece.numel <= self.starts[rank] + self.shard_numels[rank]
                )
                assert not piece.numel or inside, f"rank {rank} holds {piece} of {slot}, outside its run"

    @property
    def is_cut_into_runs(self) -> bool:
        """Whether the rows are the unsharded buffer by the nature of the cuts."""
        return bool(self.slots) and isinstance(self.slots[0], RunSlot)

    @property
    def _strips(self) -> list[Slot]:
        return [slot for slot in self.slots if isinstance(slot, Slot)]

    @property
    def _runs(self) -> list[RunSlot]:
        return [slot for slot in self.slots if isinstance(slot, RunSlot)]

    @property
    def runs(self) -> tuple[Runs, ...]:
        """The cuts of a packing cut into runs, in the order of its tensors."""
        return tuple(slot.cut for slot in self._runs)

    @cached_property
    def is_even(self) -> bool:
        """Whether all shard buffers are equally long."""
        return len(set(self.shard_numels)) <= 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's shard buffer begins in the rows."""
        return _starts(self.shard_numels)

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of all ranks' shard buffers side by side."""
        return sum(self.shard_numels)

    @cached_property
    def direct(self) -> bool:
        """Whether rows are the first bytes of whole, so that an all-gather may write the unsharded buffer itself."""
        if self.is_cut_into_runs:
            return True
        if not self.is_in_order:
            return False
        return self.num_ranks == 1 or (
            len(self.slots) == 1 and self._strips[0].shard_buffer.numel == self.shard_numels[0]
        )

    @cached_property
    def is_in_order(self) -> bool:
        """Whether all are cut per tensor, and the ranks' pieces of each, one after the other, are the tensor: gathered
        each by itself, they need no copy."""
        return not self.is_cut_into_runs and all(slot.cut.in_order for slot in self._strips)

    @cached_property
    def gaps(self) -> tuple[Extent, ...]:
        """The runs of the rows that belong to no tensor; of a packing cut into runs."""
        assert self.is_cut_into_runs, "padding between strips repeats rank by rank, and nobody reads it"
        ends = [0, *(slot.unsharded.stop for slot in sorted(self._runs, key=_in_unsharded))]
        starts = [*(slot.unsharded.start for slot in sorted(self._runs, key=_in_unsharded)), self.gathered_numel]
        return tuple(Extent(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def gaps_of(self, rank: int) -> tuple[Extent, ...]:
        """The same, as far as they are in `rank`'s shard buffer, counted from where that begins."""
        start, stop = self.starts[rank], self.starts[rank] + self.shard_numels[rank]
        parts = ((max(gap.start, start), min(gap.stop, stop)) for gap in self.gaps)
        return tuple(Extent(a - start, b - a) for a, b in parts if a < b)

    @cached_property
    def runs_together(self) -> Runs:
        """All tensors of a packing cut into runs as one of 1 dimension, from the first element to the last: the rows,
        but for the padding behind them."""
        used = max(slot.unsharded.stop for slot in self._runs)
        ends = (start + numel for start, numel in zip(self.starts, self.shard_numels, strict=True))
        return Runs((used,), self.num_ranks, 0, tuple(min(end, used) for end in ends))

    @property
    def padding(self) -> float:
        """The share of the rows buffer that holds no tensor's element, 0.0 to 1.0."""
        total = self.gathered_numel
        if self.is_cut_into_runs:
            held = sum(slot.cut.numel for slot in self.slots)
        else:
            held = sum(slot.held(rank).numel for slot in self._strips for rank in range(self.num_ranks))
        return 1 - held / total if total else 0.0

    @property
    def imbalance(self) -> float:
        """By how much the longest shard buffer exceeds the mean: 0.0 when all are equal."""
        return max(self.shard_numels) * self.num_ranks / self.gathered_numel - 1 if self.gathered_numel else 0.0


def _in_unsharded(slot: RunSlot) -> tuple[int, int]:
    return slot.unsharded.start, slot.unsharded.numel


def _starts(shard_numels: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(shard_numels[:-1], initial=0))


def _check_apart(extents: list[Extent], size: int, which: str) -> None:
    """No two overlap, and none ends after its buffer."""
    ordered = sorted(extents, key=lambda extent: (extent.start, extent.numel))
    for before, after in pairwise(ordered):
        assert before.stop <= after.start, f"slots overlap in the {which} buffer: {before}, {after}"
    assert not ordered or ordered[-1].stop <= size, f"a slot ends after the {which} buffer"


def pack(cuts: Sequence[Cut | Runs], num_ranks: int) -> Packing:
    """Lay tensors one behind the other, so that gaps are few. All are cut into runs, or none is.

    The order of `cuts` is the order of the packing's slots; where they lie is the packing's own choice.
    """
    runs = [cut for cut in cuts if isinstance(cut, Runs)]
    if runs:
        assert len(runs) == len(cuts), "tensors cut into runs have a group of their own"
        return _pack_runs(runs, num_ranks)
    return _pack_strips([cut for cut in cuts if isinstance(cut, Cut)], num_ranks)


# Cut per tensor


def _pack_strips(cuts: Sequence[Cut], num_ranks: int) -> Packing:
    """Those cut in order come first (one strided copy moves them all), and among them those whose slots keep the next
    one aligned."""

    def last(index: int) -> tuple[bool, bool]:
        return not cuts[index].in_order, _gap_behind(cuts[index].slot)

    order = sorted(range(len(cuts)), key=last)
    slots: dict[int, Slot] = {}
    shard_buffer = unsharded = 0
    for index in order:
        cut = cuts[index]
        if num_ranks == 1:
            shard_buffer = unsharded  # nothing to cut, so the two buffers may be the same bytes
        elif cut.slot >= SHORT:
            shard_buffer = aligned(shard_buffer, SHARD_ALIGNMENT)
        slots[index] = Slot(cut, Extent(shard_buffer, cut.slot), Extent(unsharded, cut.unsharded_numel))
        shard_buffer += cut.slot
        unsharded = aligned(unsharded + cut.unsharded_numel, UNSHARDED_ALIGNMENT)
    # A group that is resharded to k ranks cuts its unsharded buffer into k equal runs, for any k that divides
    # num_ranks.
    unsharded = aligned(unsharded, num_ranks)
    return Packing(num_ranks, tuple(slots[index] for index in range(len(cuts))), (shard_buffer,) * num_ranks, unsharded)


def _gap_behind(slot: int) -> bool:
    """Whether a slot of this size leaves the next one unaligned; the short ones do, and come last of all."""
    return slot < SHORT or slot % SHARD_ALIGNMENT != 0


# Cut into runs


def _pack_runs(cuts: Sequence[Runs], num_ranks: int) -> Packing:
    """Rank after rank. Where equal runs cost little padding they are made equal, else each is as long as it needs.

    A tensor that ends on the rank it began on comes before the one that goes on to the next rank, and matrices come
    before vectors: the order in which a plan had them.
    """

    def place(index: int) -> tuple[int, bool, bool]:
        cut = cuts[index]
        return cut.first, len(cut.ends) > 1, len(cut.shape) < 2

    order = sorted(range(len(cuts)), key=place)
    ordered = [cuts[index] for index in order]
    starts, rests = _lay(ordered, num_ranks)
    even = _even_numel(ordered, rests)
    if even is not None:
        starts, rests = _lay_evenly(ordered, even), (even,) * num_ranks
    run_starts = _starts(rests)
    slots = {
        index: RunSlot(cut, Extent(start, cut.numel), run_starts)
        for index, cut, start in zip(order, ordered, starts, strict=True)
    }
    unsharded = aligned(sum(rests), num_ranks)
    return Packing(num_ranks, tuple(slots[index] for index in range(len(cuts))), rests, unsharded)


def even_share(numel: int, num_ranks: int) -> int:
    """The least that `num_ranks` equal runs can be long that hold `numel` elements: runs start aligned too."""
    return aligned(-(-numel // num_ranks), UNSHARDED_ALIGNMENT)


def _even_numel(cuts: Sequence[Runs], rests: tuple[int, ...]) -> int | None:
    """How long equal runs are for these cuts; None where they are not possible, or need too much padding.

    `rests` are the runs without any padding. A rank in the middle of a tensor can take none.
    """
    longest = max(rests)
    middles = (cut.ends[at] - cut.ends[at - 1] for cut in cuts for at in range(1, len(cut.ends) - 1))
    fit = all(shard_buffer % UNSHARDED_ALIGNMENT == 0 for shard_buffer in rests) and all(
        middle == longest for middle in middles
    )
    return longest if fit and longest <= even_share(sum(rests), len(rests)) * (1 + MOST_PADDING) else None


def _lay(cuts: Sequence[Runs], num_ranks: int) -> tuple[list[int], tuple[int, ...]]:
    """Where each tensor starts in the unsharded buffer, and how long each rank's run is, padded to align only."""
    starts: list[int] = []
    bounds, cursor = [0], 0
    for cut in cuts:
        bounds += [cursor] * (cut.first + 1 - len(bounds))
        starts.append(cursor)
        bounds += [cursor + end for end in cut.ends[:-1]]
        cursor = aligned(cursor + cut.numel, UNSHARDED_ALIGNMENT)
    bounds += [cursor] * (num_ranks + 1 - len(bounds))
    return starts, tuple(after - before for before, after in pairwise(bounds))


def _lay_evenly(cuts: Sequence[Runs], even: int) -> list[int]:
    """Where each tensor starts when all runs are `even` long: one that goes on to the next rank ends its rank's run,
    the others follow each other from where the run begins."""
    starts: list[int] = []
    cursor = 0
    for cut in cuts:
        goes_on = len(cut.ends) > 1
        starts.append((cut.first + 1) * even - cut.ends[0] if goes_on else max(cursor, cut.first * even))
        cursor = aligned(starts[-1] + cut.numel, UNSHARDED_ALIGNMENT)
    return starts
