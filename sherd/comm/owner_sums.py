"""Sums of gradients as a policy's `Reduction` asks: in a wider dtype than the wire's, or in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from sherd.comm.transport import Pending, Sizes, Then, Transport, parts
from sherd.policy import Reduction


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
        """Returns the bytes of all ranks' versions of this rank's part, unless the transport sums by itself."""
        wire = self._reduction.wire_dtype(torch.float32 if itemsize == 4 else torch.bfloat16)
        if self._transport.sum_dtype(wire) is self._reduction.sum_dtype(wire):
            return self._transport.scratch_bytes(sizes, rank, itemsize)
        return _scratch_bytes(self._transport, sizes, rank, itemsize)

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


def _scratch_bytes(transport: Transport, sizes: Sequence[int], rank: int, itemsize: int) -> int:
    """Returns the bytes that `add_onto` takes on `rank`."""
    if transport.shares_memory or len(sizes) == 1:
        return 0
    return transport.scratch_bytes(sizes, rank, itemsize) or len(sizes) * sizes[rank] * itemsize


def cut(numel: int, num_parts: int) -> Sizes:
    """Returns `num_parts` lengths, as equal as possible."""
    ends = [numel * part // num_parts for part in range(num_parts + 1)]
    return Sizes(stop - start for start, stop in pairwise(ends))


def _drop(sent: torch.Tensor) -> None:
    """Do nothing; until the call, `sent` is held."""


class SumsInOrder:
    """The sums over all data-parallel ranks of a mesh, in the order of their global ranks.

    A shard is divided among its replicas, as with `DataMesh.shards_replicas`: part `shard * num_replicas + replica` is
    that of one rank.

    Args:
        transport: between all these ranks.
        order: the part of each rank of the transport's group.
        part: that of this rank.
        num_cuts: into how many parts each part that a reduction sends is to be cut.
    """

    def __init__(self, transport: Transport, order: Sequence[int], part: int, num_cuts: int) -> None:
        self._transport, self._order, self.part, self._num_cuts = transport, order, part, num_cuts
        self._is_sorted = list(order) == sorted(order)

    def sizes(self, sent: Sizes) -> Sizes:
        """Returns the lengths of all parts, given those that a reduction sends."""
        if self._num_cuts == 1:
            return sent
        return Sizes(size for part in sent for size in cut(part, self._num_cuts))

    def scratch_bytes(self, sizes: Sizes, itemsize: int) -> int:
        """Returns the bytes that `add` takes."""
        moved = 0 if self._is_sorted else sum(sizes)
        return moved * itemsize + _scratch_bytes(self._transport, sizes, self.part, itemsize)

    def add(self, total: torch.Tensor, rows: torch.Tensor, sizes: Sizes, async_op: bool) -> Pending | None:
        """Add this rank's part in the `rows` of all ranks to `total`; `sizes` are those of all parts in the rows."""
        if self._is_sorted:
            return self._transport.add_onto(total, rows, sizes, async_op)
        given = parts(rows, sizes)
        sent = torch.cat([given[part] for part in self._order])
        pending = self._transport.add_onto(total, sent, Sizes(sizes[part] for part in self._order), async_op)
        return None if pending is None else Then(pending, partial(_drop, sent))
