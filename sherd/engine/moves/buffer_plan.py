"""The buffer plan of a group: the buffers that its collectives take, and the copies that they can do without.

A plan is made once, when a unit's parameters are put into groups. `Weights` and `Gradients` carry the plan out, and the
memory forecast counts its buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import torch

from sherd.comm.streams import Streams
from sherd.comm.transport import Sizes, Transport
from sherd.engine.state.group import Group, is_large
from sherd.errors import PolicyError
from sherd.layout.extent import Extent
from sherd.policy import Codec

BATCH_BYTES = 1 << 20
"""Small gradients wait until there are this many bytes of them, and are copied in one call. On a device a quarter of it
is enough: in the backward before it the memory of waiting gradients counts more than a launch."""

MANY_RANKS = 8
"""From this many ranks on, a shard is so small that scaling it costs nothing."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors that turn a sum over ranks into the mean: `before` for each gradient, `after` for the sum."""

    before: float
    after: float

    @classmethod
    def for_(cls, dtype: torch.dtype, divide_by: float) -> Scale:
        """Returns the factors for gradients of `dtype`.

        float32 and wider types are scaled before the sum, while they are copied, which is free. bfloat16 has float32's
        range, so the sum is divided after it was widened. float16 overflows on sums and underflows on quotients: half
        of the factor (a power of two, hence exact) goes before the sum and the rest after it.
        """
        if dtype.itemsize >= 4:
            return cls(1 / divide_by, 1.0)
        if dtype == torch.float16:
            front = 2.0 ** math.floor(math.log2(divide_by) / 2)
            return cls(1 / front, front / divide_by)
        return cls(1.0, 1 / divide_by)


class Fill(Enum):
    FROM_ROWS = "the rows are gathered, and copied out when compute waits for them"
    IN_PLACE = "the rows are the first bytes of the unsharded buffer"
    TENSOR_BY_TENSOR = "each tensor is gathered by itself, straight to its place"
    FROM_RANKS = "compute copies it from the other ranks' memory, when it waits for them"
    ENCODED = "a codec's bytes are gathered, and decoded when compute waits for them"
    BY_SUBCLASS = "the tensor subclass makes the unsharded parameter of what it had gathered"


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """The plan of one group's buffers.

    Attributes:
        gathers_itself: the group is one tensor of a subclass with its own all-gather.
        may_be_rows: rows may be gathered into the unsharded buffer.
        may_gather_each: each tensor may be gathered by itself, straight to its place in the unsharded buffer.
        row_bytes: bytes of the rows, in compute's dtype.
        codec: encodes what is gathered; None: nothing does.
        is_never_gathered: the shards are the unsharded parameters.
        frees_unsharded: the memory of the unsharded parameters is freed between uses.
        sends_shards_as_they_are: an all-gather in compute's dtype reads the shard buffer itself, not a copy. Assumed of
            a tensor that gathers itself.
        may_borrow: a gradient in the reduce dtype, the group's only one, may be sent from where autograd left it.
        is_unpadded: such a gradient has as many elements as the reduction sends.
        collects_late: gradients wait as autograd left them. Rows are allocated when the reduction starts, after the
            unsharded parameters and the rows of the previous unit were freed.
        batch_bytes: small gradients wait until there are so many bytes of them.
        lane_owns_rows: rows are memory of the reduce lane, and return to it as soon as the reduction is queued. Compute
            waits for the previous reduction before it fills rows again.
        scales_sums: the sum over the ranks is scaled, not the gradients.
        reduce_dtype: the dtype in which gradients are sent.
        reduced_by_piece: the lengths of all parts that a reduction sends, with their flags.
        reduced_by_rank: the number of summed elements that each rank of the shard axis receives.
        padding: the extents of rows that hold no gradient, where a codec would encode what is there; else empty.
        owned: where sums are in the order of ranks, the lengths of all ranks' parts; else None.
    """

    gathers_itself: bool
    may_be_rows: bool
    may_gather_each: bool
    row_bytes: int
    codec: Codec | None
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
    padding: tuple[Extent, ...]
    owned: Sizes | None

    @classmethod
    def of(cls, group: Group, streams: Streams, reduce_buffers: int) -> BufferPlan:
        """Returns the plan of `group`, whose collectives run on `streams`.

        `reduce_buffers`: how many units may be reducing while the next one collects gradients.
        """
        if group.mesh.gather_codec is not None and group.unsharded_memory is not None:
            raise PolicyError(
                f"{group.name}: CommPolicy(gather=) would round the shards, which are parts of unsharded parameters "
                "that are kept; shard them (zero3, hsdp), or leave gather out"
            )
        packing, reduced, mesh, flags = group.packing, group.gradient_packing, group.mesh, group.num_flags
        # With streams, a gather that runs ahead of compute cannot write memory that belongs to compute.
        # On one rank nothing is gathered: what rests in host memory is copied straight into place, on the lane.
        may_be_rows = packing.is_cut_into_runs or (packing.direct and (streams.in_host_order or group.is_one_piece))
        is_remembered = mesh.remembers  # what was lost before is of gradients that are scaled already
        is_alone = len(group.parameters) == 1 and reduced.direct and flags == 0 and not is_remembered
        by_piece = Sizes(numel + flags for numel in reduced.shard_numels)
        return cls(
            gathers_itself=group.gathers_itself,
            may_be_rows=may_be_rows,
            may_gather_each=packing.is_in_order and not mesh.shards_replicas and not may_be_rows,
            row_bytes=packing.gathered_numel * group.compute_dtype.itemsize,
            codec=mesh.gather_codec if group.compute_dtype.is_floating_point else None,
            is_never_gathered=group.is_one_piece and group.unsharded_memory is not None,
            frees_unsharded=group.gathers_itself or (group.unsharded_memory is None and not mesh.keeps_unsharded),
            sends_shards_as_they_are=group.gathers_itself or group.is_as_computed,
            # A borrowed gradient is scaled after the sum, on which float16 overflows.
            may_borrow=is_alone and streams.in_host_order and group.reduce_dtype != torch.float16,
            is_unpadded=reduced.gathered_numel == reduced.slots[0].cut.numel,
            # Without streams small gradients are copied as they come, while they are in the cache. Large rows would
            # coexist with all activations of the unit:
            # test_large_rows_are_allocated_once_a_units_parameters_are_free.
            collects_late=is_large(reduced.gathered_numel, group.reduce_dtype) or not streams.in_host_order,
            batch_bytes=BATCH_BYTES if streams.in_host_order else BATCH_BYTES // 4,
            # With several reductions under way, compute must wait for the oldest one only.
            lane_owns_rows=not streams.in_host_order and reduce_buffers <= 1,
            # The rows of many ranks are many short strips, which a plain copy fills faster, and a shard is soon scaled.
            scales_sums=packing.num_ranks >= MANY_RANKS and group.reduce_dtype.itemsize >= 4 and not is_remembered,
            reduce_dtype=group.reduce_dtype,
            reduced_by_piece=by_piece,
            reduced_by_rank=by_piece.together(mesh.num_owners),
            padding=reduced.gaps if mesh.comm.encodes_gradients else (),
            owned=None if mesh.in_order is None else mesh.in_order.sizes(by_piece),
        )

    def fill_by(self, transport: Transport) -> Fill:
        if self.gathers_itself:
            return Fill.BY_SUBCLASS
        if self.codec is not None:
            return Fill.ENCODED
        if transport.shares_memory:
            return Fill.FROM_RANKS
        if self.may_gather_each and self.row_bytes >= transport.each_from_bytes:
            return Fill.TENSOR_BY_TENSOR
        return Fill.IN_PLACE if self.may_be_rows and not transport.brings_memory else Fill.FROM_ROWS

    def borrows(self, dtype: torch.dtype) -> bool:
        """Returns whether a contiguous gradient of `dtype`, the group's only one, may be sent from where it is."""
        return self.may_borrow and self.is_unpadded and dtype == self.reduce_dtype

    def ends_of(self, order: Sequence[int], nbytes: Mapping[int, int]) -> dict[int, Set[int]]:
        """Returns the last gradient of each batch, with the set of all gradients that have come by then.

        A batch ends once it has `batch_bytes`, and with the last gradient. Gradients are named by the indices of their
        parameters, and come in `order`.
        """
        ends: dict[int, Set[int]] = {}
        waiting = 0
        for number, index in enumerate(order, start=1):
            waiting += nbytes[index]
            if waiting >= self.batch_bytes or number == len(order):
                ends[index], waiting = frozenset(order[:number]), 0
        return ends

    def scale_for(self, divide_by: float, may_borrow: bool) -> Scale:
        """Returns the factors of a mean over `divide_by`.

        Only the sum of a borrowed gradient is scaled: the gradient is autograd's memory, which is never written. And
        only the sum in the order of ranks: its factor is the same for each number of ranks.
        """
        scales_sum = self.scales_sums or may_borrow or self.owned is not None
        return Scale(1.0, 1 / divide_by) if scales_sum else Scale.for_(self.reduce_dtype, divide_by)
