"""The transport between CPU ranks over gloo: bytes go straight from and to their places, and are added up on arrival.

gloo's own all-gather and reduce-scatter go through temporaries as large as their result, and the latter is an
all-reduce. On 2 to 4 ranks of one host these were faster at every size:

all-gather       a broadcast from each rank into its part: at 64 MiB per rank 0.4 of the single call's time
several at once  large: sends and receives: of 10 messages of 1 to 4 MiB at 0.8 of the broadcasts' time, which go two by
                 two and wait for one another
reduce-scatter   small: an all-to-all, then sums: at 64 KiB per rank 0.65 of the single call's time
                 large: sends and receives in pieces, added up as they arrive: at 64 MiB 0.25 of its time

Sends and receives are not for small parts although they were as fast on idle cores: while the main thread posts one,
gloo's own thread spins on the connection's lock, and on busy cores keeps it from the main thread for a time slice
(4 ms against 0.7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sherd._torch import adopt_timeout, wait_on_host
from sherd.comm.failures import unfinished
from sherd.comm.groups import is_debugging_in_detail
from sherd.comm.host import sums
from sherd.comm.transport import Pending, Transport, parts
from sherd.errors import CommError

_FIRST_TAG = 1 << 20
_NUM_TAGS = 1 << 16
_SMALLEST_PIECE = 256 << 10
# One piece arrives while the other one is added up. Received all at once, into memory that the kernel must first hand
# out, 64 MiB from one peer took 1.6 times as long.
_NUM_SLOTS = 2


class Gloo(Transport):
    """CPU ranks over gloo; parts may be uneven or empty, and of any dtype, for they move as bytes.

    An all-gather needs no memory besides the caller's. A reduce-scatter receives at most `ahead` bytes (512 KiB per
    peer, if that is more) in the background, and the rest in `wait()`, piece by piece, so that a piece is added up
    while it is still in the cache. The sum is made in rank order; bfloat16 and float16 are added up in float32.

    Raises:
        CommError: from a call or its `wait()`, when a peer has died or is later than the group's timeout allows.
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
        """Returns the bytes of the other ranks' versions of this rank's part, or of the pieces that are under way."""
        if self._is_small(sizes, itemsize):
            return (1 if len(sizes) == 2 else len(sizes)) * sizes[rank] * itemsize
        piece = self._piece_bytes // itemsize
        num_slots = min(_NUM_SLOTS, -(-sizes[rank] // piece))
        return num_slots * (len(sizes) - 1) * min(piece, sizes[rank]) * itemsize

    def _is_small(self, sizes: Sequence[int], itemsize: int) -> bool:
        """Returns whether all versions are received at once. It is decided from all sizes, so all ranks decide
        alike."""
        return max(sizes) * len(sizes) * itemsize <= self._ahead

    def all_gather(
        self, rows: torch.Tensor, shard_buffer: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Broadcasts every part into its place; this rank's own is copied, unless it is there."""
        call = _Call(self._link, "all-gather", rows.nbytes)
        into = parts(rows, sizes)
        for rank, part in enumerate(into):
            call.broadcast(shard_buffer if rank == self._link.rank else part, rank)
        _copy_own(into[self._link.rank], shard_buffer)
        return call.answer(async_op)

    def all_gather_several(
        self,
        rows: Sequence[torch.Tensor],
        shard_buffers: Sequence[torch.Tensor],
        sizes: Sequence[Sequence[int]],
        async_op: bool,
    ) -> Pending | None:
        """Receives all parts straight into their places, and sends this rank's to all peers, at once."""
        nbytes = sum(each.nbytes for each in rows)
        if nbytes <= self._ahead or is_debugging_in_detail():
            return super().all_gather_several(rows, shard_buffers, sizes, async_op)
        call = _Call(self._link, "all-gather", nbytes)
        into = [parts(each, of_ranks) for each, of_ranks in zip(rows, sizes, strict=True)]
        for peer in self._link.peers:
            for each in into:
                call.fill(each[peer], peer)
        for peer in self._link.peers:
            for shard_buffer in shard_buffers:
                call.send(shard_buffer, peer)
        for each, shard_buffer in zip(into, shard_buffers, strict=True):
            _copy_own(each[self._link.rank], shard_buffer)
        return call.answer(async_op)

    def reduce_scatter(
        self, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Every rank receives the other ranks' versions of its part and adds them up with its own."""
        if self._is_small(sizes, rows.element_size()) or is_debugging_in_detail():
            return _AtOnce(self._link, shard_buffer, rows, sizes).answer(async_op)
        return _InPieces(self._link, shard_buffer, rows, sizes, self._piece_bytes // rows.element_size()).answer(
            async_op
        )

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Pending | None:
        """gloo's own call: a ring, whose every rank gets the bits that one rank has added up."""
        call = _Call(self._link, "all-reduce", tensor.nbytes)
        call.all_reduce(tensor)
        return call.answer(async_op)


def _copy_own(place: torch.Tensor, shard_buffer: torch.Tensor) -> None:
    """Copy this rank's part to its place, unless it is there."""
    if place.data_ptr() != shard_buffer.data_ptr():
        place.copy_(shard_buffer)


class _Order:
    """The calls of one group, in the order in which all its ranks make them."""

    def __init__(self) -> None:
        self.unreceived: deque[_Call] = deque()
        """The calls that will ask for more bytes in their `wait()`."""
        self._num_calls = 0

    def next_number(self) -> int:
        """Returns the number of a new call, which is the same on all ranks."""
        self._num_calls += 1
        return self._num_calls

    def finish_before(self, number: int) -> None:
        """Wait for the earlier calls of which a peer may need more than what is under way by itself.

        A send completes when the peer has posted its receive. If receives were posted in the order of waits, two ranks
        that wait in different orders would deadlock (test_ranks_may_wait_in_different_orders). So earlier calls
        are finished first.
        """
        while self.unreceived and self.unreceived[0].number < number:
            self.unreceived[0].finish()


# One order per group, kept as long as the group lives. Two orders would give two calls the same number. An order that
# is made anew on some ranks only (when garbage is collected) would give one call two numbers. So an order must not hold
# its group, except through calls under way.
_orders: WeakKeyDictionary[dist.ProcessGroup, _Order] = WeakKeyDictionary()


class _Link:
    """One group as a rank of it sees it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        # Every rank begins with another peer, so that they do not all send to one.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.order = _orders.setdefault(group, _Order())


class _Call:
    """A collective under way: its sends, its receives, and what remains to be done when they are through."""

    def __init__(self, link: _Link, what: str, nbytes: int) -> None:
        self.number = link.order.next_number()
        self._link = link
        self._what = what
        self._nbytes = nbytes
        # Receives that are asked for late must not meet the bytes of a later call.
        self._tag = _FIRST_TAG + self.number % _NUM_TAGS
        self._works: list[tuple[dist.Work, int | None]] = []
        self._messages: list[tuple[dist.Work, int]] = []
        self._is_done = False
        self._failure: CommError | None = None

    def broadcast(self, part: torch.Tensor, root: int) -> None:
        """Begin to fill `part` on all ranks with the root's part. An empty part needs no call."""
        if part.numel() and self._link.peers:
            peer = None if root == self._link.rank else root
            self._begin(
                lambda: dist.broadcast(_bytes_of(part), group_src=root, group=self._link.group, async_op=True), peer
            )

    def all_to_all(self, into: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Begin to send `given` and to fill `into`. `sent` and `received` count the elements for and from each rank."""
        self._begin(
            lambda: dist.all_to_all_single(
                _bytes_of(into),
                _bytes_of(given),
                [into.element_size() * numel for numel in received],
                [into.element_size() * numel for numel in sent],
                group=self._link.group,
                async_op=True,
            ),
            None,
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Begin to sum `tensor` over all ranks, in place."""
        self._begin(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._link.group, async_op=True), None)

    def send(self, part: torch.Tensor, peer: int) -> None:
        """Begin to send `part` to `peer`, which knows its length. An empty part needs no message."""
        if part.numel():
            group, tag = self._link.group, self._tag
            sent = self._begun(lambda: dist.isend(_bytes_of(part), group_dst=peer, group=group, tag=tag), peer)
            self._messages.append((sent, peer))

    def fill(self, part: torch.Tensor, peer: int) -> None:
        """Begin to fill `part` from `peer`; `wait()` waits for it. An empty part needs no message."""
        if part.numel():
            self._messages.append((self.receive(part, peer), peer))

    def receive(self, part: torch.Tensor, peer: int) -> dist.Work:
        """Begin to fill `part` from `peer`. Returns the work, for which the caller waits."""
        return self._begun(
            lambda: dist.irecv(_bytes_of(part), group_src=peer, group=self._link.group, tag=self._tag), peer
        )

    def _begin(self, begin: Callable[[], dist.Work | None], peer: int | None) -> None:
        self._works.append((self._begun(begin, peer), peer))

    def _begun(self, begin: Callable[[], dist.Work | None], peer: int | None) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._named(error, peer) from error
        assert work is not None, "asynchronous, and this rank is in the group"
        return work

    def answer(self, async_op: bool) -> Pending | None:
        """Returns this call if it is asynchronous; else waits for it, and returns None."""
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        """Return once the results are there. May be called again."""
        if self._failure is not None:
            raise self._failure
        if not self._is_done:
            self._link.order.finish_before(self.number)
            self.finish()

    def finish(self) -> None:
        """Wait for this call alone."""
        for work, peer in self._works:
            self._named_wait(wait_on_host, work, peer)
        for message, sender in self._messages:
            self.wait_for(message, sender)
        self._works.clear()
        self._messages.clear()
        self._is_done = True

    def wait_for(self, message: dist.Work, peer: int) -> None:
        """Wait for one send or receive."""
        self._named_wait(dist.Work.wait, message, peer)

    def _named_wait(self, wait: Callable[[dist.Work], object], work: dist.Work, peer: int | None) -> None:
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

    def __init__(self, link: _Link, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int]) -> None:
        super().__init__(link, "reduce-scatter", rows.nbytes)
        self._shard_buffer = shard_buffer
        self._versions = self._exchanged(rows, sizes)

    def _exchanged(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns the tensors, by rank, that will hold all ranks' versions of this rank's part."""
        given, rank, size = parts(rows, sizes), self._link.rank, self._link.size
        if size == 1 or not rows.numel():
            return [given[rank]]
        # Between two ranks what travels lies in one run, so a rank's own part need not come along.
        keeps_own = size == 2
        received = [0 if keeps_own and peer == rank else sizes[rank] for peer in range(size)]
        sent = [0 if keeps_own and peer == rank else sizes[peer] for peer in range(size)]
        arriving = rows.new_empty(sum(received))
        self.all_to_all(arriving, given[1 - rank] if keeps_own else rows, received, sent)
        versions = parts(arriving, received)
        versions[rank] = given[rank]
        return versions

    def finish(self) -> None:
        """Wait for all versions, and add them up."""
        super().finish()
        sums.add_up(self._versions, out=self._shard_buffer)


class _InPieces(_Call):
    """A reduce-scatter: this rank's part comes from all peers in pieces, through a few slots of memory, into the sum.

    to each peer, from `rows`     | all of its part |                 under way at once
    from peer 0, into its slots   | piece 0 | piece 1 | piece 2 ...   0 and 1 asked for at once, 2 once 0 is added
    from peer 2, into its slots   | piece 0 | piece 1 | piece 2 ...   up and its slot is free
    """

    def __init__(
        self, link: _Link, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], piece_numel: int
    ) -> None:
        super().__init__(link, "reduce-scatter", rows.nbytes)
        versions = parts(rows, sizes)
        self._own = _pieces(versions[link.rank], piece_numel)
        self._sums = _pieces(shard_buffer, piece_numel)
        num_slots = min(_NUM_SLOTS, len(self._sums))
        slots = rows.new_empty(num_slots * len(link.peers), min(piece_numel, shard_buffer.numel())).unbind()
        self._slots = [dict(zip(link.peers, slots[slot::num_slots], strict=True)) for slot in range(num_slots)]
        self._arriving: deque[list[tuple[dist.Work, int]]] = deque()
        self._num_asked = 0
        for _ in range(num_slots):
            self._ask_for_next()
        for peer in link.peers:
            for piece in _pieces(versions[peer], piece_numel):
                self.send(piece, peer)
        if self._num_asked < len(self._sums):
            link.order.unreceived.append(self)

    def finish(self) -> None:
        """Receive what is missing and add it up, then wait until the peers have received theirs."""
        while self._arriving:
            self._add_up_next()
            if self._num_asked < len(self._sums):
                self._ask_for_next()
        super().finish()
        unreceived = self._link.order.unreceived
        if unreceived and unreceived[0] is self:
            unreceived.popleft()

    def _ask_for_next(self) -> None:
        slots = self._slots_of(self._num_asked)
        self._arriving.append([(self.receive(slot, peer), peer) for peer, slot in slots.items()])
        self._num_asked += 1

    def _add_up_next(self) -> None:
        piece = self._num_asked - len(self._arriving)
        for work, peer in self._arriving.popleft():
            self.wait_for(work, peer)
        versions = self._slots_of(piece)
        versions[self._link.rank] = self._own[piece]
        sums.add_up([versions[rank] for rank in range(self._link.size)], out=self._sums[piece])

    def _slots_of(self, piece: int) -> dict[int, torch.Tensor]:
        """Returns the slot of each peer for its version of a piece."""
        slots, numel = self._slots[piece % _NUM_SLOTS], self._sums[piece].numel()
        return {peer: slot if slot.numel() == numel else slot[:numel] for peer, slot in slots.items()}


def _pieces(part: torch.Tensor, numel: int) -> Sequence[torch.Tensor]:
    """Returns `part` in pieces of `numel` elements, the last of which may be shorter. An empty part has no pieces."""
    if part.numel() > numel:
        return torch.split(part, numel)
    return (part,) if part.numel() else ()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # gloo knows neither the 8-bit floats nor, in some calls, bool.
    return tensor.view(torch.uint8)
