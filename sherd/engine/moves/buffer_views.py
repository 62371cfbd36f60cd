"""The rows that collectives move, and views of the same elements in the tensors that modules use.

Rows are all ranks' shard buffers, one after the other. For each tensor of a packing these functions return matching
lists of views, so that one foreach copy moves all tensors of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

import torch

from sherd._torch import chunk_cat
from sherd.comm.buffers import Buffer
from sherd.comm.streams import CommStream
from sherd.engine.moves.buffer_plan import BATCH_BYTES, BufferPlan
from sherd.engine.state.group import Group
from sherd.layout.extent import Extent
from sherd.layout.packing import Packing, Slot
from sherd.layout.placement import Cut
from sherd.tensor.gather import shard_of

_Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of a contiguous tensor: shape, strides, and the element at which it begins."""


class RowViews:
    """The places of every tensor's elements in `rows`, 1-D, in as few strided views as possible.

    Each rank's part of the rows is followed by room for `num_flags` more elements. `flags` are the views of them,
    `[ranks, num_flags]` each, of one or more ranks.
    """

    def __init__(self, packing: Packing, rows: torch.Tensor, num_flags: int) -> None:
        self._packing = packing
        self._rows = rows
        self._num_flags = num_flags
        shard_numel = packing.shard_numels[0]
        by_rank = rows.view(packing.num_ranks, shard_numel + num_flags) if packing.is_even else None
        self.tensors: list[list[torch.Tensor]] = []
        for slot in packing.slots:
            if slot.cut.in_line:
                self.tensors.append(self._of_runs(slot, by_rank))
            else:
                assert by_rank is not None, "tensors cut by themselves take the same room on every rank"
                self.tensors.append(row_views(by_rank, slot))
        if by_rank is not None:
            self.flags = [by_rank[:, shard_numel:]]
        else:
            parts = enumerate(zip(packing.starts, packing.shard_numels, strict=True))
            ends = (start + numel + rank * num_flags for rank, (start, numel) in parts)
            self.flags = [rows[end : end + num_flags].view(1, -1) for end in ends]

    def pairs(self, tensors: Mapping[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the places of `tensors`, keyed by slot, and the matching parts of the tensors, uncopied if possible.

        The strides and offsets of the parts of a contiguous tensor are computed once.
        """
        targets = [target for index in tensors for target in self.tensors[index]]
        given = tensors.values()
        # `as_strided` counts from the beginning of the storage, so a tensor that begins elsewhere takes the slower way.
        if all(map(torch.Tensor.is_contiguous, given)) and not any(map(torch.Tensor.storage_offset, given)):
            wholes = [each for index, each in tensors.items() for _ in self._parts[index]]
            parts = [part for index in tensors for part in self._parts[index]]
            return targets, list(map(torch.Tensor.as_strided, wholes, *zip(*parts, strict=True)))
        return targets, [part for index, each in tensors.items() for part in self._sources(index, each)]

    def _sources(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return sources_for(self.tensors[index], tensor, self._packing.slots[index].cut)

    @cached_property
    def _parts(self) -> list[list[_Strided]]:  # of each slot's tensor, if the tensor is contiguous
        wholes = (torch.empty(slot.cut.shape, device="meta") for slot in self._packing.slots)
        parts = (self._sources(index, whole) for index, whole in enumerate(wholes))
        return [[(each.shape, each.stride(), int(each.storage_offset())) for each in of_one] for of_one in parts]

    def _of_runs(self, slot: Slot, by_rank: torch.Tensor | None) -> list[torch.Tensor]:
        """Returns one view for each rank with elements of the tensor, and one for all ranks that hold nothing else."""
        packing, cut = self._packing, slot.cut
        extents = [(rank, slot.held(rank)) for rank in cut.holders]
        extents = [(rank, extent) for rank, extent in extents if extent.numel]
        if len(extents) == 1 or (self._num_flags == 0 and extents):
            start = slot.unsharded.start + extents[0][0] * self._num_flags
            return [self._rows[start : start + cut.numel].view(cut.shape)]
        if by_rank is not None and len(extents) > 3:
            # The ranks between the first and the last hold nothing but this tensor.
            (first, head), (last, tail) = extents[0], extents[-1]
            return [
                by_rank[first, head.start : head.stop],
                by_rank[first + 1 : last, : packing.shard_numels[0]],
                by_rank[last, tail.start : tail.stop],
            ]
        begins = [(packing.starts[rank] + rank * self._num_flags + extent.start, extent) for rank, extent in extents]
        return [self._rows[start : start + extent.numel] for start, extent in begins]


class JoinedTensors:
    """All tensors of a group, written into the rows by one native call: a third of the time of a view and a copy each.

    For rows in host memory, of at most `most_bytes`, of tensors that all ranks share evenly, without padding between.
    """

    def __init__(self, packing: Packing, rows: torch.Tensor, most_bytes: int) -> None:
        slots, self._num_ranks, self._dtype = packing.slots, packing.num_ranks, rows.dtype
        self._order = sorted(range(len(slots)), key=lambda index: slots[index].shard.start)
        used = sum(slot.shard.numel for slot in slots)
        self._suits = (
            rows.nbytes <= most_bytes
            and rows.device.type == "cpu"
            and not packing.is_cut_into_runs
            and used == max(slot.shard.stop for slot in slots)
            and all(_is_shared_evenly(slot.cut) for slot in slots)
        )
        self._places = rows.view(packing.num_ranks, -1)[:, :used] if self._suits else rows

    def take(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Write `tensors`, keyed by slot, into the rows. Returns False if some are missing, or are unlike the rows."""
        given = tensors.values()
        if not self._suits or len(given) < len(self._order) or set(map(attrgetter("dtype"), given)) != {self._dtype}:
            return False
        if not all(map(torch.Tensor.is_contiguous, given)):
            return False
        chunk_cat(list(map(tensors.__getitem__, self._order)), 0, self._num_ranks, out=self._places)
        return True


def _is_shared_evenly(cut: Cut) -> bool:
    return bool(cut.shape and cut.numel and cut.in_order and cut.dim is not None) and cut.shape[0] % cut.num_ranks == 0


def sources_for(targets: list[torch.Tensor], tensor: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """Returns the parts of `tensor`, of shape `cut.shape`, that belong at `targets`, its views in the rows."""
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
    """Returns the places in `rows`, `[num_ranks, shard_numel]`, of one tensor cut by itself."""
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
    numels = [(rank, slot.held(rank).numel) for rank in range(cut.num_ranks)]
    return [rows[rank, start : start + numel].view(cut.local_shape(rank)) for rank, numel in numels if numel]


def tensor_views(tensor: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """Returns the parts of `tensor`, of shape `cut.shape`, that belong at `row_views`, in the same order and shapes."""
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
    """Returns the number of ranks that hold a full slot, and the number of elements on the next rank."""
    if cut.slot == 0:
        return 0, 0
    return divmod(cut.numel, cut.slot)


def tensor_in(unsharded: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Returns the tensor of `slot` as a view of the 1-D unsharded buffer."""
    return unsharded[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape)


class CopyOut(ABC):
    """Turns gathered rows into unsharded tensors, in the 1-D unsharded buffer.

    Views of the unsharded buffer are made once, here or on first use. They stay valid while it is allocated.
    """

    num_late_views = 0
    """How many tensors share the unsharded buffer that were made on first use."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> None:
        """Copy `rows`, 1-D as collectives have it, out into the unsharded buffer."""

    @abstractmethod
    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        """Copy one rank's shard buffer, `part`, to the places of its elements in the unsharded buffer."""

    def strips(self, part: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the place of each tensor of a packing `in_order` in the unsharded buffer, and its shards in `part`.

        `part` is this rank's shard buffer. A tensor's elements are laid out rank after rank. All results are 1-D.
        """
        raise NotImplementedError("the rows are the unsharded buffer")


def copy_out(packing: Packing, unsharded: torch.Tensor) -> CopyOut:
    """Returns the function that makes `unsharded` of the rows of `packing`."""
    return _CopyRuns(packing, unsharded) if packing.is_cut_into_runs else _CopyStrips(packing, unsharded)


class _CopyRuns(CopyOut):
    """For runs, whose rows are the unsharded buffer."""

    def __init__(self, packing: Packing, unsharded: torch.Tensor) -> None:
        self._starts = packing.starts
        self._unsharded = unsharded

    def __call__(self, rows: torch.Tensor) -> None:
        self._unsharded[: rows.numel()].copy_(rows)

    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        start = self._starts[rank]
        self._unsharded[start : start + part.numel()].copy_(part)


class _CopyStrips(CopyOut):
    """One native call for all tensors that are cut in order, and one for the others."""

    def __init__(self, packing: Packing, unsharded: torch.Tensor) -> None:
        self._num_ranks = packing.num_ranks
        self._shard_numel = packing.shard_numels[0]
        self._unsharded = unsharded
        in_order = (slot for slot in packing.slots if slot.cut.in_order)
        self._in_order = sorted(in_order, key=lambda slot: slot.shard.start)
        self._scattered = [slot for slot in packing.slots if not slot.cut.in_order]
        self._targets = [
            view for slot in self._scattered for view in tensor_views(tensor_in(unsharded, slot), slot.cut)
        ]
        self._sizes: list[int] = []
        self._outs: list[torch.Tensor] = []
        end = 0
        for slot in self._in_order:
            gap = slot.shard.start - end
            if gap:  # padding between slots is split off with the rest, and needs a place to go
                self._sizes.append(gap)
                self._outs.append(unsharded.new_empty(self._num_ranks, gap))
            self._sizes.append(slot.shard.numel)
            self._outs.append(self._flat(slot).view(self._num_ranks, slot.shard.numel))
            end = slot.shard.stop
        self._end = end
        self._places: dict[int, tuple[list[torch.Tensor], list[Extent], list[torch.Tensor]]] = {}

    def _flat(self, slot: Slot) -> torch.Tensor:
        return self._unsharded[slot.unsharded.start : slot.unsharded.stop]

    def __call__(self, rows: torch.Tensor) -> None:
        if self._outs:
            in_order = rows.as_strided((self._num_ranks, self._end), (self._shard_numel, 1))
            torch.split_with_sizes_copy(in_order, self._sizes, dim=1, out=self._outs)
        if self._targets:  # they may all be empty tensors
            by_rank = rows.view(self._num_ranks, self._shard_numel)
            sources = [view for slot in self._scattered for view in row_views(by_rank, slot)]
            torch._foreach_copy_(self._targets, sources)

    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        if rank not in self._places:
            runs = [out[rank] for out in self._outs]
            slots = [slot for slot in self._scattered if slot.cut.local_numel(rank)]
            targets = [shard_of(tensor_in(self._unsharded, slot), slot.cut, rank) for slot in slots]
            self._places[rank] = runs, [slot.held(rank) for slot in slots], targets
            # Only views of the unsharded buffer count: padding goes elsewhere.
            storage = self._unsharded.untyped_storage().data_ptr()
            self.num_late_views += sum(each.untyped_storage().data_ptr() == storage for each in (*runs, *targets))
        runs, extents, targets = self._places[rank]
        if runs:
            torch.split_with_sizes_copy(part[: self._end], self._sizes, out=runs)
        if targets:
            pairs = zip(extents, targets, strict=True)
            sources = [part[extent.start : extent.stop].view(target.shape) for extent, target in pairs]
            torch._foreach_copy_(targets, sources)

    def strips(self, part: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slots = [slot for slot in self._in_order if slot.shard.numel]
        return [self._flat(slot) for slot in slots], [part[slot.shard.start : slot.shard.stop] for slot in slots]


class ReduceBuffer:
    """The buffer that one reduce-scatter sends: a group's gradients, rank by rank, and a flag for each of them.

    Each rank's part ends with a flag for every tensor of the group, 1 where this rank has a gradient of the tensor.
    After the sum the flags tell a rank without a gradient that others have one. That rank takes its part of the sum,
    too, or the shards would drift apart. A large tensor with a group to itself has no flag: the group is not reduced
    without its gradient.
    """

    def __init__(self, group: Group, buffer: Buffer, lane: CommStream | None = None) -> None:
        self.buffer = buffer
        self.dtype = buffer.tensor.dtype
        self._lane = lane
        self._packing = group.gradient_packing
        self._num_flags = group.num_flags
        self.filled: set[int] = set()  # the indices of the tensors whose gradients are in the buffer

    @cached_property
    def _places(self) -> RowViews:
        """The places of gradients and flags. Made on first use: a borrowed gradient needs none."""
        return RowViews(self._packing, self.buffer.tensor, self._num_flags)

    @cached_property
    def _joined(self) -> JoinedTensors:
        return JoinedTensors(self._packing, self.buffer.tensor, BATCH_BYTES)

    @classmethod
    def freed(cls, group: Group, plan: BufferPlan, dtype: torch.dtype, lane: CommStream | None) -> ReduceBuffer:
        """Returns rows without memory. The first fill allocates it, from compute's pool, or from that of `lane`."""
        buffer = Buffer(sum(plan.reduced_by_piece), dtype, group.device)
        buffer.free()
        return cls(group, buffer, lane)

    @classmethod
    def borrowed(cls, group: Group, gradient: torch.Tensor) -> ReduceBuffer:
        """Returns rows that are the gradient of the group's only tensor, uncopied. Such a group has no flags."""
        rows = cls(group, Buffer.around(gradient.detach().view(-1)))
        rows.filled.add(0)
        return rows

    def _allocate(self) -> None:
        if self._lane is None:
            self.buffer.allocate()
        else:
            self._lane.lend(self.buffer.allocate)

    def fill(self, gradients: MutableMapping[int, torch.Tensor], scale: float) -> None:
        """Copy in `gradients`, keyed by parameter index, times `scale`. Add and drop those of `filled` parameters."""
        if torch.is_grad_enabled():  # in a backward that is differentiated, or after one
            with torch.no_grad():
                self.fill(gradients, scale)
            return
        if not self.filled:
            self._allocate()
            if self._joined.take(gradients):
                self.filled.update(gradients)
                if scale != 1.0:
                    self.buffer.tensor.mul_(scale)
                return
        again = {at: gradients.pop(at) for at in self.filled.intersection(gradients)} if self.filled else {}
        targets, sources = self._places.pairs(again) if again else ([], [])
        if targets:  # tensors may have no elements
            torch._foreach_add_(targets, sources, alpha=scale)
        targets, sources = self._places.pairs(gradients)
        if scale == 1.0 and targets:
            torch._foreach_copy_(targets, sources)
        for target, source in zip(targets, sources, strict=True) if scale != 1.0 else ():
            # Scaled while it is copied. A narrow gradient is widened first, or it would be rounded twice.
            if source.dtype == target.dtype:
                torch.mul(source, scale, out=target)
            else:
                target.copy_(source).mul_(scale)
        self.filled.update(gradients)

    def copy(self, rows: ReduceBuffer) -> None:
        """Take over what is in `rows`, of another dtype."""
        self._allocate()
        self.buffer.tensor.copy_(rows.buffer.tensor)
        self.filled.update(rows.filled)

    def rounded(self, keys: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns the rows in bfloat16, rounded at random: by the key of each tensor, and the element's place in it."""
        from sherd.codecs import random_bits, rounded_by  # of few policies, so loaded late

        sent = self.buffer.tensor.to(torch.bfloat16)
        places = RowViews(self._packing, sent, self._num_flags).tensors
        for index in sorted(self.filled):
            cut, exact = self._packing.slots[index].cut, self._places.tensors[index]
            bits = random_bits(cut.numel, keys[index], sent.device).view(cut.shape)
            for target, source, random in zip(places[index], exact, sources_for(exact, bits, cut), strict=True):
                target.copy_(rounded_by(source, random))
        return sent

    def complete(self, padding: Sequence[Extent] = ()) -> None:
        """Write the flags, and zeros in the place of each gradient that is missing, and of `padding`."""
        if not self.filled:
            self._allocate()
        missing = [index for index in range(len(self._packing.slots)) if index not in self.filled]
        for view in (view for index in missing for view in self._places.tensors[index]):
            view.zero_()
        for flags in self._places.flags if self._num_flags else ():
            flags.fill_(1)
            for index in missing:
                flags[:, index : index + 1] = 0
        for gap in padding:
            self.buffer.tensor[gap.start : gap.stop].zero_()
