"""The interface of a transport, which moves the bytes of one process group, and transports of torch's own calls.

A transport moves 1-D buffers laid out rank by rank: rank r's part takes `sizes[r]` elements, and the parts need not be
equally long. `rows` has all parts side by side, `shard_buffer` is this rank's own part:

    sizes (3, 2)     rows | 0 0 0 | 1 1 |     shard_buffer on rank 0 | 0 0 0 |     on rank 1 | 1 1 |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sherd._torch import all_gather_coalesced, bound_all_gather, bound_reduce_scatter, wait_on_host
from sherd.comm.failures import unfinished
from sherd.errors import CommError, PolicyError

if TYPE_CHECKING:
    from sherd.comm.narrowing import Narrowing

CopyIntoPlace = Callable[[int, Tensor], None]
"""A function `copy_into_place(rank, part)` that puts the `sizes[rank]` elements of rank's part where they belong."""

InPieces = Tensor | Sequence[Tensor]
"""A 1-D buffer, or its parts, one after the other."""


class Pending(Protocol):
    """A collective under way, such as torch's `Work`."""

    def wait(self) -> object: ...


class _Several:
    """Collectives that are waited for together."""

    def __init__(self, under_way: Sequence[Pending]) -> None:
        self._under_way = under_way

    def wait(self) -> None:
        for pending in self._under_way:
            pending.wait()


class Transport(ABC):
    """The collectives of one process group. All ranks of the group call the same ones in the same order.

    With `async_op` a call returns at once, and its buffers must be left alone until `wait()` of its result. Without
    `async_op`, and if the result is None, everything is done (on an accelerator: queued on the current stream).
    """

    shares_memory = False
    """It has `all_gather_onto`: ranks read one another's parts in place."""

    each_from_bytes: float = math.inf
    """With so many bytes of rows, gather tensor by tensor (`all_gather_each`): many gathers for the price of one."""

    brings_memory = False
    """Its buffers must come from `empty`."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised 1-D buffer for a collective. Call it on the lane of the collective."""
        return torch.empty(numel, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for other ranks to read."""
        return 0

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        """Returns the bytes that a reduce-scatter of parts of `sizes` elements takes on `rank` without its result."""
        return 0

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the sums that `reduce_scatter` makes of `dtype`."""
        return dtype

    @abstractmethod
    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Fill `rows` with every rank's `shard_buffer`. `shard_buffer` may be this rank's part of `rows` itself."""

    def all_gather_onto(
        self, copy_into_place: CopyIntoPlace, shard_buffer: InPieces, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Hand every rank's `shard_buffer` to `copy_into_place`, rank by rank, from where it is.

        That happens on the caller's thread, in `wait()` at the latest. `shard_buffer` may be written again as soon as
        the call has returned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory that ranks share")

    def all_gather_each(
        self, targets: Sequence[Tensor], shard_buffers: Sequence[Tensor], async_op: bool
    ) -> Pending | None:
        """Fill each of `targets`, 1-D, with every rank's tensor at the same index of `shard_buffers`.

        A tensor is equally long on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} gathers one buffer at a time")

    def all_gather_several(
        self,
        rows: Sequence[Tensor],
        shard_buffers: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        async_op: bool,
    ) -> Pending | None:
        """Make the all-gathers of `rows[i]`, `shard_buffers[i]` and `sizes[i]` for each i."""
        begun = [self.all_gather(*arguments, async_op) for arguments in zip(rows, shard_buffers, sizes, strict=True)]
        under_way = [pending for pending in begun if pending is not None]
        return _Several(under_way) if under_way else None

    @abstractmethod
    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Fill `shard_buffer`, of `sum_dtype(rows.dtype)`, with the sum of this rank's part in all ranks' `rows`."""

    def add_onto(self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Add this rank's part in all ranks' `rows` to `shard_buffer`, of any wider dtype, one after another.

        That of rank 0 comes first. The bytes are those of a reduce-scatter.
        """
        raise PolicyError(f"{type(self).__name__} has no sum in the order of ranks; leave out CommPolicy(reduce=)")

    def exchange(self, versions: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Fill `versions`, `[ranks, sizes[rank]]`, with this rank's part in all ranks' `rows`: an all-to-all."""
        raise PolicyError(f"{type(self).__name__} has no all-to-all; leave out CommPolicy(reduce=)")

    def narrowed_by(self, narrowing: Narrowing, what: str) -> Transport:
        """Returns the transport of one group, which sends `what`. Where nothing is lost it needs no `narrowing`."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        """Sum `tensor` over the ranks, in place; every rank gets the same bits."""


def parts(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns each rank's part of `rows`, as a view."""
    starts = accumulate(sizes, initial=0)
    return [rows[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class Sizes(tuple[int, ...]):
    """The sizes of all parts, one per rank. It compares thousands of ranks once, not in each call."""

    @cached_property
    def are_even(self) -> bool:
        return len(set(self)) <= 1

    def of(self, parts: range) -> Sizes:
        return self if len(parts) == len(self) else Sizes(self[parts.start : parts.stop])

    def together(self, number: int) -> Sizes:
        if number == 1:
            return self
        return Sizes(sum(self[start : start + number]) for start in range(0, len(self), number))


@lru_cache(maxsize=1024)
def cut(numel: int, num_parts: int) -> Sizes:
    """Returns `num_parts` lengths, as equal as possible."""
    ends = [numel * part // num_parts for part in range(num_parts + 1)]
    return Sizes(stop - start for start, stop in pairwise(ends))


def are_even(sizes: Sequence[int]) -> bool:
    return (sizes if type(sizes) is Sizes else Sizes(sizes)).are_even


class _Then:
    """A collective under way, and what is done with its result."""

    def __init__(self, pending: Pending, act: Callable[[], None]) -> None:
        self._pending, self._act = pending, act

    def wait(self) -> None:
        self._pending.wait()
        self._act()


def then(pending: Pending | None, act: Callable[[], None]) -> Pending | None:
    """Have `act()` called once `pending` is done: now, if there is nothing to wait for."""
    if pending is not None:
        return _Then(pending, act)
    act()
    return None


def held(*buffers: Tensor) -> None:
    """Do nothing: `then(pending, partial(held, buffer))` holds a buffer until a collective is done."""


class NoTransport(Transport):
    """Moves nothing, so that the cost of communication can be measured. Buffers keep their old contents."""

    def all_gather(self, *_: object) -> None: ...

    def reduce_scatter(self, *_: object) -> None: ...

    def add_onto(self, *_: object) -> None: ...

    def exchange(self, *_: object) -> None: ...

    def all_reduce(self, *_: object) -> None: ...


class OneRank(Transport):
    """A group of one rank: copies. The sum over one rank is there already."""

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Copy `shard_buffer`, the only part."""
        rows.copy_(shard_buffer)
        return None

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Copy `rows`, the only summand."""
        shard_buffer.copy_(rows)
        return None

    def add_onto(self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Add `rows`, the only summand."""
        shard_buffer.add_(rows)
        return None

    def exchange(self, versions: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Copy `rows`, the only version."""
        versions[0].copy_(rows)
        return None

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        return None


class _Named:
    """A call of torch under way, whose error will name the ranks of its group."""

    __slots__ = ("_group", "_is_on_host", "_pending", "_what")

    def __init__(self, pending: Pending, what: tuple[str, int], group: dist.ProcessGroup, is_on_host: bool) -> None:
        self._pending, self._what, self._group, self._is_on_host = pending, what, group, is_on_host

    def wait(self) -> None:
        try:
            if self._is_on_host and isinstance(self._pending, dist.Work):
                # The watchdog raises errors in this thread, which only the interpreter sees.
                wait_on_host(self._pending)
            else:
                self._pending.wait()
        except CommError:
            raise
        except RuntimeError as error:
            what, size = self._what
            raise unfinished(what.format(size), dist.get_process_group_ranks(self._group), error) from error


class SingleCalls(Transport):
    """torch's own collectives, one call each: for NCCL, and for every backend without a better transport.

    Parts of unequal length go through the list forms, which NCCL serves with grouped broadcasts and reductions, or
    through the transport `for_uneven`, for a backend that refuses the list forms. A call or its `wait()` raises
    CommError if a peer has died or is late.
    """

    def __init__(self, group: dist.ProcessGroup, for_uneven: Transport | None = None) -> None:
        self._group = group
        self._gather_evenly, self._reduce_evenly = bound_all_gather(group), bound_reduce_scatter(group)
        self._for_uneven = for_uneven

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Gather by one call into one buffer, or into its parts."""
        what = "all-gather of {:,} bytes", rows.nbytes
        if are_even(sizes):
            if rows.dtype.is_complex:  # the bound method of the group, unlike torch's function, takes real tensors only
                rows, shard_buffer = torch.view_as_real(rows), torch.view_as_real(shard_buffer)
            return self._called(self._gather_evenly[async_op], rows, shard_buffer, what=what, async_op=async_op)
        if self._for_uneven is not None:
            return self._for_uneven.all_gather(rows, shard_buffer, sizes, async_op)
        return self._called(dist.all_gather, parts(rows, sizes), shard_buffer, self._group, async_op, what=what)

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Reduce by one call from one buffer, or from its parts."""
        what = "reduce-scatter of {:,} bytes", rows.nbytes
        if are_even(sizes):
            return self._called(self._reduce_evenly[async_op], shard_buffer, rows, what=what, async_op=async_op)
        if self._for_uneven is not None:
            return self._for_uneven.reduce_scatter(shard_buffer, rows, sizes, async_op)
        op, into = dist.ReduceOp.SUM, parts(rows, sizes)
        return self._called(dist.reduce_scatter, shard_buffer, into, op, self._group, async_op, what=what)

    def add_onto(self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Receive all ranks' versions by one all-to-all, and add them."""
        versions = rows.new_empty(len(sizes), shard_buffer.numel())

        def add() -> None:
            for version in versions:
                shard_buffer.add_(version)

        return then(self.exchange(versions, rows, sizes, async_op), add)

    def exchange(self, versions: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Receive all ranks' versions by one call."""
        what, received = ("all-to-all of {:,} bytes", rows.nbytes), [versions.shape[1]] * len(sizes)
        call = partial(dist.all_to_all_single, group=self._group, async_op=async_op)
        return self._called(call, versions.view(-1), rows, received, list(sizes), what=what, async_op=async_op)

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        """Reduce by one call, in place."""
        what = "all-reduce of {:,} bytes", tensor.nbytes
        return self._called(dist.all_reduce, tensor, dist.ReduceOp.SUM, self._group, async_op, what=what)

    def _called(
        self, call: Callable[..., Pending | None], *args: object, what: tuple[str, int], async_op: bool = True
    ) -> Pending | None:
        """Returns the result of `call(*args)`, whose errors name the ranks. Without `async_op` it waits."""
        try:
            pending = call(*args)
            if pending is not None and not async_op:
                pending.wait()
                return None
        except CommError:
            raise
        except RuntimeError as error:
            raise unfinished(what[0].format(what[1]), dist.get_process_group_ranks(self._group), error) from error
        return None if pending is None else _Named(pending, what, self._group, self._for_uneven is not None)


class CoalescedCalls(SingleCalls):
    """Like `SingleCalls`, but each tensor of a group is gathered straight into its place; on NCCL all in one launch."""

    each_from_bytes = 0.0

    def all_gather_each(
        self, targets: Sequence[Tensor], shard_buffers: Sequence[Tensor], async_op: bool
    ) -> Pending | None:
        what = "all-gather of {:,} tensors at once", len(targets)
        return self._called(all_gather_coalesced, targets, shard_buffers, self._group, async_op, what=what)


class LargeCoalesced(CoalescedCalls):
    """Like `CoalescedCalls` for large groups of tensors. Of small ones a copy costs less than their many messages."""

    each_from_bytes = 32 * 2**20


class PartByPart(SingleCalls):
    """Like `SingleCalls`, for gloo on an accelerator, whose list forms refuse parts of unequal length.

    Each such part is broadcast, and of an all-reduce each rank keeps its part. The host waits for both: ranks that
    share a device over gloo try a program out, and need not be fast.
    """

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Gather by one call, or by a broadcast of each part that is not empty."""
        if are_even(sizes):
            return super().all_gather(rows, shard_buffer, sizes, async_op)
        into = parts(rows, sizes)
        into[self._group.rank()].copy_(shard_buffer)

        def broadcast_all() -> None:
            for root, part in enumerate(into):
                if part.numel():
                    # As bytes: gloo does not know the 8-bit floats.
                    dist.broadcast(part.view(torch.uint8), group_src=root, group=self._group)

        return self._called(broadcast_all, what=("all-gather of {:,} bytes", rows.nbytes))

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Reduce by one call, or by an all-reduce of a copy of `rows`."""
        if are_even(sizes):
            return super().reduce_scatter(shard_buffer, rows, sizes, async_op)
        # A clone: an all-reduce sums in place, and a reduce-scatter leaves `rows` as they are.
        total = rows.clone()
        self.all_reduce(total, async_op=False)
        shard_buffer.copy_(parts(total, sizes)[self._group.rank()])
        return None
