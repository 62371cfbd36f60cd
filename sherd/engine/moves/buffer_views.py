"""Two views of the same elements: in the rows that collectives move, and in the tensors that modules use.

Rows are every rank's shard buffer, one after the other. For each tensor of a packing these functions give matching
lists of views, so that one foreach copy moves a whole group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import torch

from sherd.layout.extent import Extent
from sherd.layout.packing import Packing, Slot
from sherd.layout.placement import Cut
from sherd.tensor.gather import shard_of

_Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of a contiguous tensor: its shape, its strides, and where in the tensor's elements it begins."""


class RowViews:
    """The places of every tensor's elements in `rows`: as few strided views as can be.

    `rows` is 1-D. Behind each rank's part there is room for `num_flags` more elements, `flags`: `[ranks, num_flags]`
    each, of one or more ranks.
    """

    def __init__(self, packing: Packing, rows: torch.Tensor, num_flags: int) -> None:
        self._packing = packing
        self._rows = rows
        self._num_flags = num_flags
        by_rank = None
        if packing.is_even:
            by_rank = rows.view(packing.num_ranks, packing.shard_numels[0] + num_flags)
        self.tensors = [
            self._of_runs(slot, by_rank) if slot.cut.in_line else row_views(_needed(by_rank), slot)
            for slot in packing.slots
        ]
        self.flags = self._flags(by_rank) if num_flags else []

    def pairs(self, tensors: Mapping[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the places of `tensors`, of the slots with these numbers, and the matching parts of the tensors,
        uncopied where they are contiguous. Where the parts of such a tensor lie is worked out once."""
        targets = [target for index in tensors for target in self.tensors[index]]
        given = tensors.values()
        if all(map(torch.Tensor.is_contiguous, given)) and not any(map(torch.Tensor.storage_offset, given)):
            wholes = [each for index, each in tensors.items() for _ in self._parts[index]]
            parts = [part for index in tensors for part in self._parts[index]]
            return targets, list(map(torch.Tensor.as_strided, wholes, *zip(*parts, strict=True)))
        return targets, [part for index, each in tensors.items() for part in self._sources(index, each)]

    def _sources(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return sources_for(self.tensors[index], tensor, self._packing.slots[index].cut)

    @cached_property
    def _parts(self) -> list[list[_Strided]]:
        """The parts of each slot's tensor, if that is contiguous."""
        wholes = (torch.empty(slot.cut.shape, device="meta") for slot in self._packing.slots)
        parts = (self._sources(index, whole) for index, whole in enumerate(wholes))
        return [[(each.shape, each.stride(), int(each.storage_offset())) for each in of_one] for of_one in parts]

    def _flags(self, by_rank: torch.Tensor | None) -> list[torch.Tensor]:
        if by_rank is not None:
            return [by_rank[:, self._packing.shard_numels[0] :]]
        ends = (start + numel for start, numel in zip(self._packing.starts, self._packing.shard_numels, strict=True))
        return [
            self._rows[end + rank * self._num_flags : end + (rank + 1) * self._num_flags].view(1, -1)
            for rank, end in enumerate(ends)
        ]

    def _of_runs(self, slot: Slot, by_rank: torch.Tensor | None) -> list[torch.Tensor]:
        """One view for each rank that holds some of the tensor; one for all that hold nothing else."""
        packing, cut = self._packing, slot.cut
        held = [(rank, slot.held(rank)) for rank in cut.holders]
        held = [(rank, extent) for rank, extent in held if extent.numel]
        if len(held) == 1 or (self._num_flags == 0 and held):
            start = slot.unsharded.start + held[0][0] * self._num_flags
            return [self._rows[start : start + cut.numel].view(cut.shape)]
        if by_rank is not None and len(held) > 3:
            numel = packing.shard_numels[0]
            (first, head), (last, tail) = held[0], held[-1]
            return [
                by_rank[first, head.start : head.stop],
                by_rank[first + 1 : last, :numel],
                by_rank[last, tail.start : tail.stop],
            ]
        begins = [(packing.starts[rank] + rank * self._num_flags + extent.start, extent) for rank, extent in held]
        return [self._rows[start : start + extent.numel] for start, extent in begins]


def _needed(by_rank: torch.Tensor | None) -> torch.Tensor:
    assert by_rank is not None, "tensors cut by themselves take the same room on every rank"
    return by_rank


def sources_for(targets: list[torch.Tensor], tensor: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """The parts of `tensor`, of shape `cut.shape`, that belong at `targets`, its views in the rows."""
    if len(targets) == 1 and targets[0].numel() == tensor.numel():
        return [tensor.reshape(targets[0].shape)]
    if not cut.in_line:
        return tensor_views(tensor, cut)
    flat = tensor.reshape(-1)
    ends = [0]
    for target in targets:
        ends.append(ends[-1] + target.numel())
    return [flat[a:b].view(target.shape) for (a, b), target in zip(pairwise(ends), targets, strict=True)]


def row_views(rows: torch.Tensor, slot: Slot) -> list[torch.Tensor]:
    """The places in `rows`, `[num_ranks, shard_numel]`, of one tensor cut by itself."""
    cut = slot.cut
    start = slot.shard.start
    if cut.dim is None:
        return [rows[:, start : slot.shard.stop]]
    if cut.in_order:
        full, remainder = _full_ranks(cut)
        views = [rows[:full, start : slot.shard.stop]]
        if remainder:
            views.append(rows[full : full + 1, start : start + remainder])
        return [view for view in views if view.numel()]
    held = [(rank, slot.held(rank).numel) for rank in range(cut.num_ranks)]
    return [rows[rank, start : start + numel].view(cut.local_shape(rank)) for rank, numel in held if numel]


def tensor_views(tensor: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """The parts of `tensor`, of shape `cut.shape`, that belong at `row_views`, in the same order and shapes."""
    if cut.dim is None:
        return [tensor.reshape(1, -1).expand(cut.num_ranks, -1)]
    if cut.in_order:
        full, remainder = _full_ranks(cut)
        flat = tensor.reshape(-1)
        views = [flat[: full * cut.slot].view(full, cut.slot)]
        if remainder:
            views.append(flat[full * cut.slot :].view(1, remainder))
        return [view for view in views if view.numel()]
    return [tensor.narrow(cut.dim, rows.start, rows.numel) for rows in cut.rows if rows.numel and cut.numel]


def _full_ranks(cut: Cut) -> tuple[int, int]:
    """Returns the number of ranks that hold a full slot, and the number of elements that the next one holds."""
    if cut.slot == 0:
        return 0, 0
    return divmod(cut.numel, cut.slot)


class CopyOut(ABC):
    """Turns what was gathered into whole tensors, in the 1-D unsharded buffer. Views of that are made once, here or
    when they are first needed, and stay valid while it is allocated."""

    num_late_views = 0
    """How many tensors share the unsharded buffer that were made when they were first needed."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> None:
        """Copy `rows`, 1-D as collectives have it, out into the unsharded buffer."""

    @abstractmethod
    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        """Copy one rank's shard buffer, `part`, to where its elements go in the unsharded buffer."""

    def strips(self, part: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A packing `in_order`, tensor by tensor: where its elements lie in the unsharded buffer, rank after rank, and
        what this rank has of it in `part`, its shard buffer. All 1-D."""
        raise NotImplementedError("the rows are the unsharded buffer")


def copy_out(packing: Packing, unsharded: torch.Tensor) -> CopyOut:
    """Returns the function that makes `unsharded` of the rows of `packing`."""
    return _CopyRuns(packing, unsharded) if packing.is_cut_into_runs else _CopyStrips(packing, unsharded)


class _CopyRuns(CopyOut):
    """The rows are the unsharded buffer."""

    def __init__(self, packing: Packing, unsharded: torch.Tensor) -> None:
        self._starts = packing.starts
        self._unsharded = unsharded

    def __call__(self, rows: torch.Tensor) -> None:
        self._unsharded[: rows.numel()].copy_(rows)

    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        start = self._starts[rank]
        self._unsharded[start : start + part.numel()].copy_(part)


class _CopyStrips(CopyOut):
    """One native call for all tensors that are cut in order, one for the others."""

    def __init__(self, packing: Packing, unsharded: torch.Tensor) -> None:
        self._num_ranks = packing.num_ranks
        self._shard_numel = packing.shard_numels[0]
        self._unsharded = unsharded
        in_order = (slot for slot in packing.slots if slot.cut.in_order)
        self._in_order = sorted(in_order, key=lambda slot: slot.shard.start)
        self._scattered = [slot for slot in packing.slots if not slot.cut.in_order]
        self._targets = [view for slot in self._scattered for view in tensor_views(self._tensor(slot), slot.cut)]
        self._sizes: list[int] = []
        self._outs: list[torch.Tensor] = []
        end = 0
        for slot in self._in_order:
            self._skip(slot.shard.start - end)
            self._sizes.append(slot.shard.numel)
            self._outs.append(
                unsharded[slot.unsharded.start : slot.unsharded.stop].view(self._num_ranks, slot.shard.numel)
            )
            end = slot.shard.stop
        self._end = end
        self._into_places: dict[int, _IntoPlace] = {}

    def _skip(self, gap: int) -> None:
        """Padding between slots is split off with the rest; it needs somewhere to go."""
        if gap:
            self._sizes.append(gap)
            self._outs.append(self._unsharded.new_empty(self._num_ranks, gap))

    def _tensor(self, slot: Slot) -> torch.Tensor:
        return self._unsharded[slot.unsharded.start : slot.unsharded.stop].view(slot.cut.shape)

    def __call__(self, rows: torch.Tensor) -> None:
        by_rank = rows.view(self._num_ranks, self._shard_numel)
        if self._outs:
            torch.split_with_sizes_copy(by_rank[:, : self._end], self._sizes, dim=1, out=self._outs)
        if self._targets:  # they may all be empty tensors
            sources = [view for slot in self._scattered for view in row_views(by_rank, slot)]
            torch._foreach_copy_(self._targets, sources)

    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        into_place = self._into_places.get(rank)
        if into_place is None:
            into_place = self._into_places[rank] = self._into_place(rank)
        into_place(part)

    def strips(self, part: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slots = [slot for slot in self._in_order if slot.shard.numel]
        places = [self._unsharded[slot.unsharded.start : slot.unsharded.stop] for slot in slots]
        return places, [part[slot.shard.start : slot.shard.stop] for slot in slots]

    def _into_place(self, rank: int) -> _IntoPlace:
        scattered = [
            (slot.held(rank), shard_of(self._tensor(slot), slot.cut, rank))
            for slot in self._scattered
            if slot.cut.local_numel(rank)
        ]
        into_place = _IntoPlace(self._sizes, [out[rank] for out in self._outs], scattered)
        self.num_late_views += into_place.num_views(self._unsharded)
        return into_place


class _IntoPlace:
    """The places to which the elements of one rank's shard buffer go: runs of it in turn, and extents of it into
    strided places."""

    def __init__(
        self, sizes: list[int], runs: list[torch.Tensor], scattered: list[tuple[Extent, torch.Tensor]]
    ) -> None:
        self._sizes = sizes
        self._end = sum(sizes)
        self._runs = runs
        self._extents = [extent for extent, _ in scattered]
        self._targets = [target for _, target in scattered]

    def num_views(self, unsharded: torch.Tensor) -> int:
        """Returns how many of its places are in `unsharded`, and not in what padding is thrown into."""
        storage = unsharded.untyped_storage().data_ptr()
        return sum(each.untyped_storage().data_ptr() == storage for each in (*self._runs, *self._targets))

    def __call__(self, part: torch.Tensor) -> None:
        if self._runs:
            torch.split_with_sizes_copy(part[: self._end], self._sizes, out=self._runs)
        if self._targets:
            sources = [
                part[extent.start : extent.stop].view(target.shape)
                for extent, target in zip(self._extents, self._targets, strict=True)
            ]
            torch._foreach_copy_(self._targets, sources)
