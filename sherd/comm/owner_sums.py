"""Sums of gradients as a policy's `Reduction` asks: in a wider dtype than the wire's, or in the order of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.codecs import codec_of, decode_parts, decoding_bytes, encode_parts, parts_at_once
from sherd.comm.narrowing import Narrowing
from sherd.comm.transport import Pending, Sizes, Transport, cut, held, parts, then
from sherd.comm.wire_errors import WireErrors, squares
from sherd.policy import Codec, Reduction


def num_bytes(reduction: Reduction, sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a reduction of parts of `sizes` elements of `dtype`."""
    encoded = codec_of(reduction.wire)
    if encoded is not None and dtype.is_floating_point:
        return sum(map(encoded.num_bytes, sizes))
    return sum(sizes) * reduction.wire_dtype(dtype).itemsize


class OwnerSums(Transport):
    """The sums of `transport` in the dtypes of `reduction`: where the backend has no such sum, by the owners.

    `group` has the ranks of `transport`; `errors` are those of what a codec encodes or a dtype rounds.
    """

    def __init__(
        self, transport: Transport, group: dist.ProcessGroup, reduction: Reduction, errors: WireErrors | None = None
    ) -> None:
        self._transport, self._rank, self._num_ranks = transport, group.rank(), group.size()
        self._reduction, self._codec = reduction, codec_of(reduction.wire)
        self.errors = WireErrors() if errors is None else errors
        self._narrowing: Narrowing | None = None
        self._what = ""

    def narrowed_by(self, narrowing: Narrowing, what: str) -> Transport:
        """Returns the sums of one group, which keeps in `narrowing` what it has to."""
        if not self._reduction.is_remembered:
            return self
        own = copy.copy(self)
        own._narrowing, own._what = narrowing, what
        return own

    def _sent(self, values: Tensor, wire: torch.dtype, sizes: Sequence[int], what: str) -> tuple[Tensor, Sequence[int]]:
        """Returns what is sent of `values`, which have parts of `sizes`, and the lengths of its parts."""
        codec, lengths = self._codec_for(values), sizes
        narrowing = self._narrowing if values.is_floating_point() else None
        if narrowing is not None:
            values = narrowing.owed(self._reduction, what, values)
            sent, lengths = narrowing.narrowed(codec, self._reduction, what, values, sizes, dist.get_rank())
        elif codec is not None:
            sent, lengths = encode_parts(codec, values, sizes)
        else:
            sent = values.to(wire)
        if self.errors.listeners and sent is not values:
            if codec is None:
                self.errors.add(squares(sent, values))
            else:
                self.errors.note(codec, values, sent, sizes)
        if narrowing is not None and self._reduction.feedback:
            narrowing.keep(codec, values, sizes, sent, lengths)
        return sent, lengths

    @property
    def nbytes(self) -> int:
        """The bytes that `transport` holds for other ranks to read."""
        return self._transport.nbytes

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        """Returns the bytes of all ranks' versions of this rank's part, unless the transport sums by itself."""
        dtype = self._reduction.wire_dtype(torch.float32 if itemsize == 4 else torch.bfloat16)
        narrowed = 0 if self._codec is not None or dtype.itemsize == itemsize else sum(sizes) * dtype.itemsize
        itemsize = min(itemsize, dtype.itemsize)
        if self._codec is None and self._transport.sum_dtype(dtype) is self._reduction.sum_dtype(dtype):
            return narrowed + self._transport.scratch_bytes(sizes, rank, itemsize)
        return narrowed + scratch_bytes(self._transport, self._codec, sizes, rank, itemsize)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the reduction's sums of `dtype`."""
        return self._reduction.sum_dtype(self._reduction.wire_dtype(dtype))

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Gather as `transport` does."""
        return self._transport.all_gather(rows, shard_buffer, sizes, async_op)

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Sum by the transport's reduce-scatter if that adds in the dtype of `shard_buffer`."""
        codec, wire = self._codec_for(rows), self._reduction.wire_dtype(rows.dtype)
        sent, lengths = self._sent(rows, wire, sizes, self._what)
        if codec is not None:
            return add_decoded(self._transport, codec, shard_buffer.zero_(), sent, lengths, async_op)
        if self._transport.sum_dtype(sent.dtype) is shard_buffer.dtype:
            pending = self._transport.reduce_scatter(shard_buffer, sent, sizes, async_op)
        else:
            pending = self._transport.add_onto(shard_buffer.zero_(), sent, sizes, async_op)
        return pending if sent is rows else then(pending, partial(held, sent))

    def _codec_for(self, values: Tensor) -> Codec | None:
        return self._codec if values.is_floating_point() and not self.errors.is_unencoded else None

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        """Sum parts on their owners, and gather the sums, rounded to the dtype of the wire, or encoded, too.

        Done when the call returns, unless `transport` has such a sum.
        """
        wire, codec = self._reduction.wire_dtype(tensor.dtype), self._codec_for(tensor)
        if codec is None and wire is tensor.dtype is self._reduction.sum_dtype(wire):
            return self._transport.all_reduce(tensor, async_op)
        sizes = cut(tensor.numel(), self._num_ranks)
        total = tensor.new_empty(sizes[self._rank], dtype=self.sum_dtype(tensor.dtype))
        pending = self.reduce_scatter(total, tensor, sizes, False)
        assert pending is None, "without async_op it is done"
        own, _ = self._sent(total, wire, [total.numel()], "back")
        lengths = sizes if codec is None else Sizes(map(codec.num_bytes, sizes))
        gathered = own.new_empty(sum(lengths))
        self._transport.all_gather(gathered, own, lengths, False)
        if codec is None:
            tensor.copy_(gathered)
        else:
            decode_parts(codec, gathered, sizes, tensor)
        return None


def add_decoded(
    transport: Transport, codec: Codec, total: Tensor, sent: Tensor, lengths: Sequence[int], async_op: bool
) -> Pending | None:
    """Add this rank's part in what all ranks have `sent`, encoded, to `total`, rank by rank."""
    versions = sent.new_empty(len(lengths), codec.num_bytes(total.numel()))

    def decode() -> None:
        at_once = parts_at_once(codec, [total.numel()])
        for encoded in versions.split(at_once):
            decoded = total.new_empty(len(encoded), total.numel())
            codec.decode(*((encoded, decoded) if at_once > 1 else (encoded[0], decoded[0])))
            for version in decoded:
                total.add_(version)
            del decoded, version  # or they would be held while the next are decoded

    pending = transport.exchange(versions, sent, lengths, async_op)
    return then(pending, partial(_after, sent, decode))


def _after(sent: Tensor, act: Callable[[], None]) -> None:
    """Call `act()`; until the call, `sent` is held."""
    act()


def scratch_bytes(transport: Transport, codec: Codec | None, sizes: Sequence[int], rank: int, itemsize: int) -> int:
    """Returns the bytes that such sums take on `rank`."""
    if codec is not None:
        own = codec.num_bytes(sizes[rank])
        # The versions that are decoded at once; encoding takes less.
        decoding = decoding_bytes(codec, [sizes[rank]] * len(sizes), 4)
        return sum(map(codec.num_bytes, sizes)) + len(sizes) * own + decoding
    if transport.shares_memory or len(sizes) == 1:
        return 0
    return transport.scratch_bytes(sizes, rank, itemsize) or len(sizes) * sizes[rank] * itemsize


class SumsInOrder:
    """The sums over all data-parallel ranks of a mesh, in the order of their global ranks.

    A shard is divided among its replicas, as with `DataMesh.shards_replicas`: part `shard * num_replicas + replica` is
    that of one rank.

    Args:
        transport: between all these ranks.
        reduction: how gradients travel.
        order: the part of each rank of the transport's group.
        part: that of this rank.
        num_cuts: into how many parts each part that a reduction sends is to be cut.

    Attributes:
        at: this rank's place in the order of ranks, and their number.
    """

    def __init__(
        self, transport: Transport, reduction: Reduction, order: Sequence[int], part: int, num_cuts: int
    ) -> None:
        self._transport, self.reduction = transport, reduction
        self._order, self.part, self._num_cuts = order, part, num_cuts
        self._is_sorted = list(order) == sorted(order)
        self.at = order.index(part), len(order)

    def sizes(self, sent: Sizes) -> Sizes:
        """Returns the lengths of all parts, given those that a reduction sends."""
        if self._num_cuts == 1:
            return sent
        return Sizes(size for part in sent for size in cut(part, self._num_cuts))

    def scratch_bytes(self, sizes: Sizes, itemsize: int) -> int:
        """Returns the bytes that `add` takes."""
        moved = 0 if self._is_sorted else sum(sizes)
        return moved * itemsize + scratch_bytes(self._transport, None, sizes, self.part, itemsize)

    def add(self, total: Tensor, rows: Tensor, sizes: Sizes, async_op: bool) -> Pending | None:
        """Add this rank's part in the `rows` of all ranks to `total`; `sizes` are those of all parts in the rows."""
        if self._is_sorted:
            return self._transport.add_onto(total, rows, sizes, async_op)
        given = parts(rows, sizes)
        sent, lengths = torch.cat([given[part] for part in self._order]), Sizes(sizes[part] for part in self._order)
        pending = self._transport.add_onto(total, sent, lengths, async_op)
        return then(pending, partial(held, sent))
