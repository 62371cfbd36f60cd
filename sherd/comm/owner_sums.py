"""Sums of gradients as a policy's `Reduction` asks: in another dtype than that of the wire, or in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sherd.comm.transport import Pending, Sizes, Then, Transport, parts
from sherd.policy import Reduction

if TYPE_CHECKING:
    from sherd.comm.mesh import DataMesh


class OwnerSums(Transport):
    """The sums of `transport` in the dtypes of `reduction`: where the backend has no such sum, by the owners.

    `group` has the ranks of `transport`.
    """

    def __init__(self, transport: Transport, group: dist.ProcessGroup, reduction: Reduction) -> None:
        self._transport, self._rank, self._num_ranks = transport, group.rank(), group.size()
        self._reduction = reduction

    @property
    def nbytes(self) -> int:
        """The bytes that `transport` holds for other ranks to read."""
        return self._transport.nbytes

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        """Returns the bytes of all ranks' versions of this rank's part, or those of `transport`."""
        return max(self._transport.scratch_bytes(sizes, rank, itemsize), len(sizes) * sizes[rank] * itemsize)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the reduction's sums of `dtype`."""
        return self._reduction.sum_dtype(self._reduction.wire_dtype(dtype))

    def all_gather(
        self, rows: torch.Tensor, shard_buffer: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Gather as `transport` does."""
        return self._transport.all_gather(rows, shard_buffer, sizes, async_op)

    def reduce_scatter(
        self, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Sum by the transport's reduce-scatter if that adds in the dtype of `shard_buffer`."""
        sent = rows.to(self._reduction.wire_dtype(rows.dtype))
        if self._transport.sum_dtype(sent.dtype) is shard_buffer.dtype:
            return self._transport.reduce_scatter(shard_buffer, sent, sizes, async_op)
        return self._transport.add_onto(shard_buffer.zero_(), sent, sizes, async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Pending | None:
        """Sum parts on their owners, and gather the sums, rounded to the dtype of the wire, too.

        Done when the call returns, unless `transport` has such a sum.
        """
        wire = self._reduction.wire_dtype(tensor.dtype)
        if wire is tensor.dtype is self._reduction.sum_dtype(wire):
            return self._transport.all_reduce(tensor, async_op)
        sizes = cut(tensor.numel(), self._num_ranks)
        total = tensor.new_empty(sizes[self._rank], dtype=self.sum_dtype(tensor.dtype))
        sent = tensor.to(wire)
        pending = self.reduce_scatter(total, sent, sizes, False)
        assert pending is None, "without async_op it is done"
        self._transport.all_gather(sent, total.to(wire), sizes, False)
        tensor.copy_(sent)
        return None


def cut(numel: int, num_parts: int) -> Sizes:
    """Returns `num_parts` lengths, as equal as possible."""
    ends = [numel * part // num_parts for part in range(num_parts + 1)]
    return Sizes(stop - start for start, stop in zip(ends, ends[1:], strict=False))


class SumsInOrder:
    """The sums over all data-parallel ranks of `mesh`, in the order of their global ranks.

    A shard is divided among its replicas, as with `mesh.shards_replicas`: part `shard * num_replicas + replica` is that
    of one rank. Making it is collective.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self.part = mesh.shard_rank * mesh.num_replicas + mesh.replica
        self._num_replicas, self._is_divided = mesh.num_replicas, mesh.shards_replicas
        group, self._transport = mesh.with_all_ranks()
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._order = [self._part_of(mesh, rank) for rank in ranks] or [0]
        """The part of each rank of the group."""

    def _part_of(self, mesh: DataMesh, rank: int) -> int:
        (at,) = (mesh.mesh.mesh == rank).nonzero().tolist()
        shard = 0 if mesh.shard_axis is None else at[mesh.shard_axis]
        replica = 0 if mesh.replicate_axis is None else at[mesh.replicate_axis]
        return int(shard * mesh.num_replicas + replica)

    def sizes(self, by_piece: Sizes) -> Sizes:
        """Returns the lengths of all parts, given those of the pieces that a reduction sends."""
        if self._num_replicas == 1 or self._is_divided:
            return by_piece
        return Sizes(size for of_shard in by_piece for size in cut(of_shard, self._num_replicas))

    def add(self, total: torch.Tensor, rows: torch.Tensor, sizes: Sizes, async_op: bool) -> Pending | None:
        """Add this rank's part in the `rows` of all ranks to `total`; `sizes` are those of all parts in the rows."""
        if self._order == sorted(self._order):
            return self._transport.add_onto(total, rows, sizes, async_op)
        given = parts(rows, sizes)
        sent = torch.cat([given[part] for part in self._order])
        pending = self._transport.add_onto(total, sent, Sizes(sizes[part] for part in self._order), async_op)
        return None if pending is None else Then(pending, sent.detach)  # which holds it until then
