"""The buffer plan of a group: which buffers its collectives take, and what may be done without one.

It is made once, when a unit's parameters are put into groups. `Weights` and `Arrivals` carry it out, and the memory
forecast counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import torch

from sherd.comm.streams import Streams
from sherd.comm.transport import Sizes, Transport
from sherd.engine.moves.scale import MANY_RANKS, Scale
from sherd.engine.state.group import Group, is_large

BATCH_BYTES = 1 << 20
"""Small gradients wait until this many bytes have come, and are copied in one call; a quarter of it on a device, where
what waits counts more than a launch."""


class Fill(Enum):
    """The way in which an all-gather fills the unsharded buffer."""

    FROM_ROWS = "the rows are gathered, and copied out when compute waits for them"
    IN_PLACE = "the rows are the first bytes of the unsharded buffer"
    TENSOR_BY_TENSOR = "each tensor is gathered by itself, straight to its place"
    FROM_RANKS = "compute copies it from the other ranks' memory, when it waits for them"
    BY_SUBCLASS = "the tensor subclass makes the unsharded parameter of what it had gathered"


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The plan of one group's buffers.

    Attributes:
        gathers_itself: the group is one tensor of a subclass with its own all-gather.
        may_be_rows: rows may be gathered into the unsharded buffer.
        may_gather_each: each tensor may be gathered by itself, straight to its place in the unsharded buffer.
        is_never_gathered: the shards are the unsharded parameters.
        frees_unsharded: the memory of the unsharded parameters is freed between uses.
        sends_shards_as_they_are: an all-gather in compute's dtype reads the shard buffer itself, not a copy of it. Of a
            tensor that gathers itself, it is taken for granted.
        may_borrow: a gradient in the reduce dtype, the group's only one, may be sent from where autograd has left it.
        is_unpadded: such a gradient is as long as what is sent.
        collects_late: gradients that will be reduced wait as they are, and rows are allocated for the reduction only,
            after the unsharded parameters were freed, and the rows of the unit before.
        batch_bytes: small gradients wait until so many bytes have come.
        lane_owns_rows: gradients are collected in memory of the reduce lane, which goes back to it as soon as the
            reduction is queued. Compute waits for the reduction before when it next takes such rows.
        scales_sums: the sum over the ranks is scaled, not the gradients.
        reduce_dtype: the dtype in which gradients are sent.
        reduced_by_piece: the lengths of all pieces of what a reduction sends, with their flags.
        reduced_by_rank: how much each rank of the shard axis gets the sum of.
    """

    gathers_itself: bool
    may_be_rows: bool
    may_gather_each: bool
    is_never_gathered: bool
    frees_unsharded: bool
    sends_shards_as_they_are: bool
    may_borrow: bool
    is_unpadded: bool
    collects_late: bool
    batch_bytes: int
    lane_owns_rows: bool
    scales_sums: bool
    reduce_dtype: torch.dtype
    reduced_by_piece: Sizes
    reduced_by_rank: Sizes

    @classmethod
    def of(cls, group: Group, streams: Streams, reduce_buffers: int) -> BufferPlan:
        """Returns the plan of `group`, whose collectives run on `streams`, and of whose unit's like so many may be in
        reduction while the next gradients are collected."""
        packing, mesh, flags = group.packing, group.mesh, group.num_flags
        # With streams, compute's memory cannot be written ahead of compute.
        may_be_rows = packing.is_cut_into_runs or (packing.direct and streams.in_host_order)
        is_alone = len(group.parameters) == 1 and packing.direct and flags == 0
        by_piece = Sizes(numel + flags for numel in group.sizes) if flags else group.sizes
        is_as_computed = group.compute_dtype == group.dtype and group.place.device == group.device
        return cls(
            gathers_itself=group.gathers_itself,
            may_be_rows=may_be_rows,
            may_gather_each=packing.is_in_order and not mesh.shards_replicas and not may_be_rows,
            is_never_gathered=group.is_one_piece and group.unsharded_memory is not None,
            frees_unsharded=group.gathers_itself or (group.unsharded_memory is None and not mesh.keeps_unsharded),
            sends_shards_as_they_are=group.gathers_itself or is_as_computed,
            may_borrow=is_alone and streams.in_host_order and group.reduce_dtype != torch.float16,
            is_unpadded=packing.gathered_numel == packing.slots[0].cut.numel,
            # Without streams small gradients are copied as they come, while they are in the cache. Large rows would
            # stand beside all activations of the unit:
            # test_large_rows_are_allocated_once_a_units_parameters_are_free.
            collects_late=is_large(packing.gathered_numel, group.reduce_dtype) or not streams.in_host_order,
            batch_bytes=BATCH_BYTES if streams.in_host_order else BATCH_BYTES // 4,
            # With more than one reduction under way, compute is to wait for none but the oldest.
            lane_owns_rows=not streams.in_host_order and reduce_buffers <= 1,
            # The rows of many ranks are many short strips, which a plain copy fills faster, and a shard is soon scaled.
            scales_sums=packing.num_ranks >= MANY_RANKS and group.reduce_dtype.itemsize >= 4,
            reduce_dtype=group.reduce_dtype,
            reduced_by_piece=by_piece,
            reduced_by_rank=by_piece.together(mesh.num_owners) if flags else group.shard_sizes,
        )

    def fill_by(self, transport: Transport) -> Fill:
        """Returns the way in which an all-gather by `transport` fills the unsharded buffer."""
        if self.gathers_itself:
            return Fill.BY_SUBCLASS
        if transport.shares_memory:
            return Fill.FROM_RANKS
        if transport.coalesces and self.may_gather_each:
            return Fill.TENSOR_BY_TENSOR
        return Fill.IN_PLACE if self.may_be_rows and not transport.brings_memory else Fill.FROM_ROWS

    def borrows(self, dtype: torch.dtype) -> bool:
        """Returns whether a contiguous gradient of `dtype`, the group's only one, may be sent from where it is."""
        return self.may_borrow and self.is_unpadded and dtype == self.reduce_dtype

    def ends_of(self, order: Sequence[int], nbytes: Mapping[int, int]) -> dict[int, Set[int]]:
        """Returns which gradients end a batch, each with all that have come by then, if they come in this `order`, of
        their parameters' indices. A batch ends once it has `batch_bytes`, and with the last gradient."""
        ends: dict[int, Set[int]] = {}
        waiting = 0
        for number, index in enumerate(order, start=1):
            waiting += nbytes[index]
            if waiting >= self.batch_bytes or number == len(order):
                ends[index], waiting = frozenset(order[:number]), 0
        return ends

    def scale_for(self, divide_by: float, may_borrow: bool) -> Scale:
        """Returns the scale of a mean over `divide_by`. A borrowed gradient is autograd's, and not written to: it is
        scaled once it was summed."""
        scales_sum = self.scales_sums or may_borrow
        return Scale(1.0, 1 / divide_by) if scales_sum else Scale.for_(self.reduce_dtype, divide_by)
