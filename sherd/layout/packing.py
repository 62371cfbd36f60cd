"""How a group's tensors lie in its buffers: one record of offsets, checked when it is made. Integers only.

Three buffers share one packing (2 ranks; tensors a and b, `|` between slots, `.` for padding):

    rest     rank r's shards, 1-D, what the optimizer owns             | a_r | b_r . |
    rows     what the ranks' rest buffers become side by side,         | a_0 | b_0 . |
             `[num_ranks, rest_numel]`: the gathered, and the          | a_1 | b_1 . |
             to-be-scattered, form
    whole    every tensor in its own order, 1-D                        | a_0 a_1 | b_0 . b_1 . |

In the whole buffer a tensor takes its padded pieces one after the other where that keeps it in order (`Cut.in_order`),
so that one strided copy per tensor turns rows into whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sherd.layout.extent import Extent, aligned
from sherd.layout.placement import Cut

WHOLE_ALIGNMENT = 16
"""Whole tensors start at multiples of this many elements: 16 bytes, which kernels want, even at one byte per
element."""

REST_ALIGNMENT = 4
"""Shards do so at multiples of this many, 16 bytes in float32, unless they are shorter than `SHORT`: with thousands of
ranks a shard is a few elements, and gaps between those would make the collectives several times larger."""

SHORT = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: its extent in each rank's rest buffer, and in the whole buffer; padding included."""

    cut: Cut
    rest: Extent
    whole: Extent

    def held(self, rank: int) -> Extent:
        """The elements of `rank`'s rest buffer that are the tensor's own, without padding."""
        return Extent(self.rest.start, self.cut.local_numel(rank))


@dataclass(frozen=True, slots=True)
class Packing:
    """All slots of a group, in the order of its tensors, and the sizes of its buffers."""

    num_ranks: int
    slots: tuple[Slot, ...]
    rest_numel: int
    whole_numel: int

    def __post_init__(self) -> None:
        for which, size in (("rest", self.rest_numel), ("whole", self.whole_numel)):
            extents = sorted((getattr(slot, which) for slot in self.slots), key=lambda e: (e.start, e.numel))
            for before, after in pairwise(extents):
                assert before.stop <= after.start, f"slots overlap in the {which} buffer: {before}, {after}"
            assert not extents or extents[-1].stop <= size, f"a slot ends after the {which} buffer"
        assert self.whole_numel % self.num_ranks == 0, "the whole buffer must divide by the ranks, to be resharded"
        for slot in self.slots:
            cut = slot.cut
            rows = self.num_ranks if cut.dim is None else cut.shape[cut.dim]
            assert cut.num_rows_held == rows, f"some row of a tensor of shape {cut.shape} has no owner, or two"
            assert cut.dim is None or cut.is_consecutive, f"rows of a tensor of shape {cut.shape} are out of order"
            assert slot.rest.numel >= cut.slot, f"the rest slot of a tensor of shape {cut.shape} is too short"
            assert slot.whole.numel >= cut.whole_numel, f"the whole slot of a tensor of shape {cut.shape} is too short"

    @property
    def rows_numel(self) -> int:
        """Elements of all ranks' rest buffers side by side."""
        return self.num_ranks * self.rest_numel

    @property
    def direct(self) -> bool:
        """Whether rows are the first bytes of whole, so that an all-gather may write the whole buffer itself."""
        if not all(slot.cut.in_order for slot in self.slots):
            return False
        return self.num_ranks == 1 or (len(self.slots) == 1 and self.slots[0].rest.numel == self.rest_numel)

    @property
    def padding(self) -> float:
        """The share of the rows buffer that holds no tensor's element, 0.0 to 1.0."""
        total = self.rows_numel
        held = sum(slot.held(rank).numel for slot in self.slots for rank in range(self.num_ranks))
        return 1 - held / total if total else 0.0


def pack(cuts: Sequence[Cut], num_ranks: int) -> Packing:
    """Lay tensors one behind the other, so that gaps are few and the common case is one run.

    Those cut in order come first (one strided copy moves them all), and among them those whose slots keep the next one
    aligned. The order of `cuts` is the order of the packing's slots; where they lie is the packing's own choice.
    """

    def last(index: int) -> tuple[bool, bool]:
        return not cuts[index].in_order, _gap_behind(cuts[index].slot)

    order = sorted(range(len(cuts)), key=last)
    slots: dict[int, Slot] = {}
    rest = whole = 0
    for index in order:
        cut = cuts[index]
        if num_ranks == 1:
            rest = whole  # nothing to cut, so the two buffers may be the same bytes
        elif cut.slot >= SHORT:
            rest = aligned(rest, REST_ALIGNMENT)
        slots[index] = Slot(cut, Extent(rest, cut.slot), Extent(whole, cut.whole_numel))
        rest += cut.slot
        whole = aligned(whole + cut.whole_numel, WHOLE_ALIGNMENT)
    # A group that is resharded to k ranks cuts its whole buffer into k equal runs, for any k that divides num_ranks.
    whole = aligned(whole, num_ranks)
    return Packing(num_ranks, tuple(slots[index] for index in range(len(cuts))), rest, whole)


def _gap_behind(slot: int) -> bool:
    """Whether a slot of this size leaves the next one unaligned; the short ones do, and come last of all."""
    return slot < SHORT or slot % REST_ALIGNMENT != 0
