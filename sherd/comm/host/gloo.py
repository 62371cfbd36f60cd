"""The transport between CPU ranks over gloo: bytes go straight from and to their places, and are added up on arrival.

gloo's own all-gather and reduce-scatter go through temporaries as large as their result, and its reduce-scatter is an
all-reduce. On 2 to 4 ranks of one host these were faster at every size:

all-gather       a broadcast from each rank into its part: at 64 MiB per rank 0.4 of the single call's time
several at once  large: sends and receives: of 10 messages of 1 to 4 MiB at 0.8 of the broadcasts' time, which go two by
                 two and wait for one another
reduce-scatter   small: an all-to-all, then sums: at 64 KiB per rank 0.65 of the single call's time
                 large: sends and receives in chunks, added up as they arrive: at 64 MiB 0.25 of its time

Small parts are not sent and received, although that was as fast on idle cores: while the main thread posts a message,
gloo's own thread spins on the connection's lock, and on busy cores keeps it from the main thread for a time slice
(4 ms against 0.7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from sherd._torch import adopt_timeout, wait_on_host
from sherd.comm.failures import unfinished
from sherd.comm.groups import is_debugging_in_detail
from sherd.comm.host import sums
from sherd.comm.transport import Pending, Transport, parts
from sherd.errors import CommError

_FIRST_TAG = 1 << 20
_NUM_TAGS = 1 << 16
_SMALLEST_PIECE = 256 << 10
# One chunk arrives while the other one is added up. Received at once, into memory that the kernel must first hand out,
# 64 MiB from one peer took 1.6 times as long.
_NUM_SLOTS = 2


class Gloo(Transport):
    """CPU ranks over gloo; parts may be uneven or empty, and of any dtype, because they move as bytes.

    An all-gather needs no memory except for the caller's. A reduce-scatter receives at most `ahead` bytes (512 KiB per
    peer, if that is more) in the background, and the rest in `wait()`, chunk by chunk, so that a chunk is added up
    while it is still in the cache. Sums are made in rank order; bfloat16 and float16 are added up in float32. A call or
    its `wait()` raises CommError if a peer has died, or is late by more than the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, ahead: int = 8 << 20) -> None:
        adopt_timeout(group)
        self._link = _Link(group)
        num_peers = max(group.size() - 1, 1)
        self._piece_bytes = max(ahead // (_NUM_SLOTS * num_peers), _SMALLEST_PIECE)
        self._ahead = ahead

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns float32 for bfloat16 and float16, else the dtype itself."""
        return sums.sum_dtype(dtype)

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        """Returns the bytes of all ranks' versions of this rank's part, or of the chunks that are under way."""
        if self._is_small(sizes, itemsize):
            return (1 if len(sizes) == 2 else len(sizes)) * sizes[rank] * itemsize
        piece = self._piece_bytes // itemsize
        num_slots = min(_NUM_SLOTS, -(-sizes[rank] // piece))
        return num_slots * (len(sizes) - 1) * min(piece, sizes[rank]) * itemsize

    def _is_small(self, sizes: Sequence[int], itemsize: int) -> bool:
        """Returns whether all versions are received at once."""
        # From the sizes of all ranks, so that all ranks decide alike.
        return max(sizes) * len(sizes) * itemsize <= self._ahead

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Broadcast every part into its place, and copy this rank's own, unless it is in place."""
        call = _Call(self._link, "all-gather", rows.nbytes)
        into = parts(rows, sizes)
        for rank, part in enumerate(into):
            call.broadcast(shard_buffer if rank == self._link.rank else part, rank)
        _copy_own(into[self._link.rank], shard_buffer)
        return call.answer(async_op)

    def all_gather_several(
        self,
        rows: Sequence[Tensor],
        shard_buffers: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        async_op: bool,
    ) -> Pending | None:
        """Receive all parts straight into their places, and send this rank's to all peers, at once."""
        nbytes = sum(rows_of_one.nbytes for rows_of_one in rows)
        # torch's debug mode wants equally many calls from all ranks, messages counted.
        if nbytes <= self._ahead or is_debugging_in_detail():
            return super().all_gather_several(rows, shard_buffers, sizes, async_op)
        call = _Call(self._link, "all-gather", nbytes)
        places = [parts(rows_of_one, of_ranks) for rows_of_one, of_ranks in zip(rows, sizes, strict=True)]
        for peer in self._link.peers:
            for by_rank in places:
                call.fill(by_rank[peer], peer)
        for peer in self._link.peers:
            for shard_buffer in shard_buffers:
                call.send(shard_buffer, peer)
        for by_rank, shard_buffer in zip(places, shard_buffers, strict=True):
            _copy_own(by_rank[self._link.rank], shard_buffer)
        return call.answer(async_op)

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Receive the other ranks' versions of this rank's part, and add them up with its own."""
        return self._sum(sums.add_up, shard_buffer, rows, sizes).answer(async_op)

    def add_onto(self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Receive the other ranks' versions of this rank's part, and add them with its own to `shard_buffer`."""
        return self._sum(sums.add_onto, shard_buffer, rows, sizes).answer(async_op)

    def exchange(self, versions: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Receive all versions at once."""
        return _AtOnce(self._link, sums.collect, versions, rows, sizes).answer(async_op)

    def _sum(self, add: sums.Add, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int]) -> _Call:
        if self._is_small(sizes, rows.element_size()) or is_debugging_in_detail():
            return _AtOnce(self._link, add, shard_buffer, rows, sizes)
        return _InPieces(self._link, add, shard_buffer, rows, sizes, self._piece_bytes // rows.element_size())

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        """Sum by gloo's own call: a ring, in which every rank gets the bits that one rank has added up."""
        call = _Call(self._link, "all-reduce", tensor.nbytes)
        call.all_reduce(tensor)
        return call.answer(async_op)


def _copy_own(place: Tensor, shard_buffer: Tensor) -> None:
    if place.data_ptr() != shard_buffer.data_ptr():
        place.copy_(shard_buffer)


class _Order:
    def __init__(self) -> None:
        self.numbers = count(1)
        """The numbers of calls, the same on all ranks."""
        self.unreceived: deque[_Call] = deque()
        """The calls that will post more receives in their `wait()`."""

    def finish_before(self, number: int) -> None:
        # A send completes when the peer has posted its receive. If receives were posted in the order of waits, two
        # ranks that wait in different orders would deadlock: test_ranks_may_wait_in_different_orders.
        while self.unreceived and self.unreceived[0].number < number:
            self.unreceived[0].finish()


# One order per group, kept as long as the group lives. Two orders would give two calls the same number. An order made
# again on some ranks only (after a garbage collection) would give one call two numbers. An order must not hold its
# group, except through calls under way.
_orders: WeakKeyDictionary[dist.ProcessGroup, _Order] = WeakKeyDictionary()


class _Link:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        # Every rank begins with another peer, so that they do not all send to one.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.order = _orders.setdefault(group, _Order())


class _Call:
    """A collective under way: its sends, its receives, and what remains to be done after them."""

    def __init__(self, link: _Link, what: str, nbytes: int) -> None:
        self.number = next(link.order.numbers)
        self._link = link
        self._what = what
        self._nbytes = nbytes
        # Receives that are posted late must not match the sends of a later call.
        self._tag = _FIRST_TAG + self.number % _NUM_TAGS
        self._begun: list[tuple[Callable[[dist.Work], object], dist.Work, int | None]] = []
        """How each work is waited for, the work, and the rank to blame for it, if one rank alone is."""
        self._is_done = False
        self._failure: CommError | None = None

    def broadcast(self, part: Tensor, root: int) -> None:
        """Begin to fill `part` on all ranks with the root's part. An empty part needs no call."""
        if part.numel() and self._link.peers:
            peer = None if root == self._link.rank else root
            self._collective(
                lambda: dist.broadcast(_bytes_of(part), group_src=root, group=self._link.group, async_op=True), peer
            )

    def all_reduce(self, tensor: Tensor) -> None:
        self._collective(
            lambda: dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._link.group, async_op=True), None
        )

    def _collective(self, begin: Callable[[], dist.Work | None], peer: int | None) -> None:
        self._begun.append((wait_on_host, self._begin(begin, peer), peer))

    def send(self, part: Tensor, peer: int) -> None:
        """Begin to send `part` to `peer`, which knows its length. An empty part needs no message."""
        if part.numel():
            group, tag = self._link.group, self._tag
            sent = self._begin(lambda: dist.isend(_bytes_of(part), group_dst=peer, group=group, tag=tag), peer)
            self._begun.append((dist.Work.wait, sent, peer))

    def fill(self, part: Tensor, peer: int) -> None:
        """Begin to fill `part` from `peer`; `wait()` waits for it. An empty part needs no message."""
        if part.numel():
            self._begun.append((dist.Work.wait, self.receive(part, peer), peer))

    def receive(self, part: Tensor, peer: int) -> dist.Work:
        """Begin to fill `part` from `peer`. Returns the work, for which the caller waits."""
        return self._begin(
            lambda: dist.irecv(_bytes_of(part), group_src=peer, group=self._link.group, tag=self._tag), peer
        )

    def _begin(self, begin: Callable[[], dist.Work | None], peer: int | None) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._named(error, peer) from error
        assert work is not None, "asynchronous, and this rank is in the group"
        return work

    def answer(self, async_op: bool) -> Pending | None:
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_done:
            self._link.order.finish_before(self.number)
            self.finish()

    def finish(self) -> None:
        for wait, work, peer in self._begun:
            self.wait_for(work, peer, wait)
        self._begun.clear()
        self._is_done = True

    def wait_for(self, work: dist.Work, peer: int | None, wait: Callable[[dist.Work], object] = dist.Work.wait) -> None:
        """Wait for `work`. A send or receive takes the default `wait`, since one that times out breaks a connection."""
        try:
            wait(work)
        except RuntimeError as error:
            raise self._named(error, peer) from error

    def _named(self, error: RuntimeError, peer: int | None) -> CommError:
        what = f"{self._what} of {self._nbytes:,} bytes over gloo"
        self._failure = unfinished(what, dist.get_process_group_ranks(self._link.group), error, peer)
        return self._failure


class _AtOnce(_Call):
    """A reduce-scatter that receives all versions of this rank's part, and then adds them up."""

    def __init__(self, link: _Link, add: sums.Add, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int]) -> None:
        super().__init__(link, "reduce-scatter", rows.nbytes)
        self._add, self._shard_buffer = add, shard_buffer
        given, rank, size = parts(rows, sizes), link.rank, link.size
        self._versions = [given[rank]]
        if size == 1 or not rows.numel():
            self._versions *= size  # which are empty, if there are several
            return
        # Of two ranks, the part for the other one is contiguous without this rank's own, which need not travel.
        keeps_own = size == 2
        received = [0 if keeps_own and peer == rank else sizes[rank] for peer in range(size)]
        arriving = rows.new_empty(sum(received))
        sent = given[1 - rank] if keeps_own else rows
        num_received = [rows.element_size() * numel for numel in received]
        num_sent = [0 if keeps_own and peer == rank else rows.element_size() * sizes[peer] for peer in range(size)]
        self._collective(
            lambda: dist.all_to_all_single(
                _bytes_of(arriving), _bytes_of(sent), num_received, num_sent, group=link.group, async_op=True
            ),
            None,
        )
        self._versions = parts(arriving, received)
        self._versions[rank] = given[rank]

    def finish(self) -> None:
        super().finish()
        self._add(self._versions, self._shard_buffer)


class _InPieces(_Call):
    """A reduce-scatter: this rank's part comes from all peers in chunks, through a few slots of memory, into the sum.

    to each peer, from `rows`     | all of its part |                 under way at once
    from peer 0, into its slots   | chunk 0 | chunk 1 | chunk 2 ...   0 and 1 asked for at once, 2 once 0 is added
    from peer 2, into its slots   | chunk 0 | chunk 1 | chunk 2 ...   up and its slot is free
    """

    def __init__(
        self,
        link: _Link,
        add: sums.Add,
        shard_buffer: Tensor,
        rows: Tensor,
        sizes: Sequence[int],
        piece_numel: int,
    ) -> None:
        super().__init__(link, "reduce-scatter", rows.nbytes)
        self._add = add
        versions = parts(rows, sizes)
        self._own = _pieces(versions[link.rank], piece_numel)
        self._sums = _pieces(shard_buffer, piece_numel)
        num_slots = min(_NUM_SLOTS, len(self._sums))
        slots = rows.new_empty(num_slots * len(link.peers), min(piece_numel, shard_buffer.numel())).unbind()
        self._slots = [dict(zip(link.peers, slots[slot::num_slots], strict=True)) for slot in range(num_slots)]
        self._arriving: deque[list[tuple[dist.Work, int]]] = deque()
        self._num_asked = 0
        for _ in range(num_slots):
            self._receive_next()
        for peer in link.peers:
            for piece in _pieces(versions[peer], piece_numel):
                self.send(piece, peer)
        if self._num_asked < len(self._sums):
            link.order.unreceived.append(self)

    def finish(self) -> None:
        while self._arriving:
            piece = self._num_asked - len(self._arriving)
            for work, peer in self._arriving.popleft():
                self.wait_for(work, peer)
            versions = self._slots_of(piece)
            versions[self._link.rank] = self._own[piece]
            self._add([versions[rank] for rank in range(self._link.size)], self._sums[piece])
            if self._num_asked < len(self._sums):
                self._receive_next()
        super().finish()  # the peers have received this rank's chunks
        unreceived = self._link.order.unreceived
        if unreceived and unreceived[0] is self:
            unreceived.popleft()

    def _receive_next(self) -> None:
        slots = self._slots_of(self._num_asked)
        self._arriving.append([(self.receive(slot, peer), peer) for peer, slot in slots.items()])
        self._num_asked += 1

    def _slots_of(self, piece: int) -> dict[int, Tensor]:
        slots, numel = self._slots[piece % _NUM_SLOTS], self._sums[piece].numel()
        return {peer: slot if slot.numel() == numel else slot[:numel] for peer, slot in slots.items()}


def _pieces(part: Tensor, numel: int) -> Sequence[Tensor]:
    """Returns `part` in chunks of `numel` elements, the last of which may be shorter. An empty part has no chunks."""
    if part.numel() > numel:
        return torch.split(part, numel)
    return (part,) if part.numel() else ()


def _bytes_of(tensor: Tensor) -> Tensor:
    # gloo knows neither the 8-bit floats nor, in some calls, bool.
    return tensor.view(torch.uint8)
