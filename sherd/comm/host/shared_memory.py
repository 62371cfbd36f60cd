"""The transport between CPU ranks of one host: each rank reads the memory of the others.

In a *round* every rank copies what the others need into its segment and posts to them where it lies. Each reads it from
there, straight to where it belongs, or adds it up on the way. A collective is one round, or several when it is large:

    rank 0   fill, post ----.   .--- read rank 1's, say so
                             \\ /
    rank 1   fill, post -----'-'---- read rank 0's, say so          memory is filled anew when all have read it
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from sherd._torch import adopt_timeout, timeout_of
from sherd.comm.host.neighbours import Neighbour, Neighbours, Post, meet
from sherd.comm.host.rounds import (
    ALL_GATHER,
    ALL_GATHER_ONTO,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Gather,
    Question,
    Round,
    Sum,
    SumOfWholes,
    copier_into,
)
from sherd.comm.host.segments import Regions, Segment, new_segment
from sherd.comm.host.sums import addable, sum_dtype
from sherd.comm.transport import CopyIntoPlace, InPieces, Pending, Transport, parts, pieces_of
from sherd.errors import CommError

STAGING_LIMIT = 64 << 20
"""The most bytes of a rank that may wait to be read. A larger `all_gather_onto` takes as many as it needs."""

_CHUNK = 8 << 20
"""Bytes that a large collective stages per round, if the caller waits for it. Smaller rounds stay in a nearer
cache, but each costs a meeting: of 0.25 to 16 MiB, 4 MiB and more took the least time, above all on shared cores."""

_ROUNDS_AHEAD = 2  # one is read while the next one is filled
_SMALL = 64 << 10
"""Up to here an all-reduce of more than two ranks is cheaper in one round than in two."""

_MOST_ROUNDS = 64  # messages that fit into a socket


class _Call:
    """A collective under way. If it is dropped before `wait()`, it no longer writes to the caller's memory."""

    def __init__(self, transport: SharedMemory, rounds: Sequence[Round]) -> None:
        self._transport = transport
        self._rounds = rounds

    def wait(self) -> None:
        """Return once the results are there. May be called again. Raises CommError."""
        if self._rounds:
            self._transport.finish(self._rounds)
            self._rounds = ()

    def __del__(self) -> None:
        for round_ in self._rounds:
            round_.forget()


class SharedMemory(Transport):
    """CPU ranks of one host; parts may be uneven or empty, and of any dtype.

    Sums are made in rank order; bfloat16 and float16 are added up in float32. `copy_into_place` gets the other rank's
    own memory, and must have read it when it returns.

    Raises, from a call or its `wait()`:
        CommError: a rank has died, has given up or stays silent for longer than the group's timeout; or ranks ask for
            different collectives; or this process was forked from the one that called `meet`. Every further call then
            raises the same error.
    """

    shares_memory = True

    def __init__(self, group: dist.ProcessGroup, segment: Segment, neighbours: Neighbours, limit: int) -> None:
        self._rank = group.rank()
        self._size = group.size()
        self._world_rank = dist.get_global_rank(group, self._rank)
        self._segment = segment
        self._regions = Regions()
        self._neighbours = neighbours
        self._limit = limit
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._error = ""
        self._begun: deque[Round] = deque()
        """Rounds whose bytes another rank may still have to read, oldest first."""
        self._begun_bytes = 0
        self._num_begun = 0
        self._num_read = 0
        self._unconfirmed = 0
        self._touched = 0
        self._end = weakref.finalize(self, _end, neighbours, segment, self._process)

    @classmethod
    def meet(
        cls, group: dist.ProcessGroup, timeout: timedelta | None = None, limit: int = STAGING_LIMIT
    ) -> SharedMemory | None:
        """Returns the transport of `group` if all its ranks can read one another's memory; else None, on all of them.

        Ranks can if they are on one Linux host, in one network namespace and of one user. All ranks of the group, which
        is on gloo, must make this call.

        Args:
            group: the ranks.
            timeout: how long to wait for another rank; None means the group's own timeout.
            limit: see `STAGING_LIMIT`.
        """
        adopt_timeout(group)
        segment = new_segment(limit)
        found = None
        try:
            found = meet(group, segment, ("sherd shared memory 1", limit, _CHUNK))
        finally:
            if found is None and segment is not None:
                segment.close()
        if found is None:
            return None
        assert segment is not None, "nobody has neighbours without one"
        if timeout is None:
            timeout = timeout_of(group, torch.device("cpu")) or dist.default_pg_timeout
        return cls(group, segment, Neighbours(found, timeout.total_seconds()), limit)

    @property
    def nbytes(self) -> int:
        """The memory that this rank holds for the others to read, in bytes."""
        return 0 if self._segment.fd < 0 else self._segment.nbytes

    def close(self) -> None:
        """Leave the group. The others can still read what this rank has shown; every further call raises CommError."""
        with self._lock:
            if not self._error:
                self._stop("this transport was closed")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns float32 for bfloat16 and float16, else the dtype itself."""
        return sum_dtype(dtype)

    def all_gather(
        self, rows: torch.Tensor, shard_buffer: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Copies every part from its rank's segment, and this rank's own from `shard_buffer` unless it is in place."""
        question = Question(ALL_GATHER, shard_buffer.dtype, tuple(sizes), async_op)
        return self._begin_all(self._gathers(question, rows.detach(), shard_buffer.detach()), async_op)

    def all_gather_onto(
        self, copy_into_place: CopyIntoPlace, shard_buffer: InPieces, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Places this rank's own part before the call returns, and the others' in the order of their arrival."""
        pieces = pieces_of(shard_buffer)
        question = Question(ALL_GATHER_ONTO, pieces[0].dtype, tuple(sizes), async_op)
        return self._begin_all(self._gather_onto(question, copy_into_place, pieces), async_op)

    def reduce_scatter(
        self, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Every rank adds up its part from the others' segments. `shard_buffer` may be this rank's part of `rows`."""
        question = Question(REDUCE_SCATTER, addable(rows.dtype), tuple(sizes), async_op)
        assert shard_buffer.dtype == sum_dtype(rows.dtype), "the caller asks sum_dtype"
        return self._begin_all(self._sums(question, shard_buffer.detach(), rows.detach()), async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Pending | None:
        """Every rank adds up small tensors and those of two ranks. Other tensors are done when the call returns."""
        flat = tensor.detach().view(-1)
        addable(flat.dtype)
        if self._size > 2 and flat.nbytes > _SMALL:
            cuts = [flat.numel() * rank // self._size for rank in range(self._size + 1)]
            sizes = [cuts[rank + 1] - cuts[rank] for rank in range(self._size)]
            total = torch.empty(sizes[self._rank], dtype=sum_dtype(flat.dtype))
            self.reduce_scatter(total, flat, sizes, async_op=False)
            self.all_gather(flat, total.to(flat.dtype), sizes, async_op=False)
            return None
        question = Question(ALL_REDUCE, flat.dtype, (flat.numel(),) * self._size, async_op)
        return self._begin_all(self._sums_of_wholes(question, flat), async_op)

    # The rounds of each collective. Each generator yields a round to begin, then does what needs no other rank.

    def _pieces(self, question: Question, shown: Sequence[int]) -> Iterator[list[slice]]:
        """Yields each rank's slice for each round. `shown` is how many elements each rank would stage in one."""
        sizes, itemsize = question.sizes, question.dtype.itemsize
        most = max(shown) * itemsize
        longest = max(sizes)
        if most > (self._limit if question.is_async else 2 * _CHUNK):
            num_rounds = -(-most // _CHUNK)
            step = -(-longest // num_rounds)
        else:
            step = max(longest, 1)
        for start in range(0, max(longest, 1), step):
            yield [slice(min(start, size), min(start + step, size)) for size in sizes]

    def _gathers(self, question: Question, rows: torch.Tensor, shard_buffer: torch.Tensor) -> Iterator[Round]:
        into = parts(rows, question.sizes)
        own = into[self._rank]
        is_there = own.data_ptr() == shard_buffer.data_ptr()
        for cut in self._pieces(question, question.sizes):
            here = cut[self._rank]
            shown = [piece.stop - piece.start for piece in cut]
            yield Gather(question, shown, [shard_buffer[here]], copier_into(into, cut))
            if not is_there:
                own[here].copy_(shard_buffer[here])

    def _gather_onto(
        self, question: Question, copy_into_place: CopyIntoPlace, pieces: Sequence[torch.Tensor]
    ) -> Iterator[Round]:
        round_ = Gather(question, question.sizes, pieces, copy_into_place)
        yield round_
        # Several pieces are taken in one from where they were copied to; nobody frees that before this rank has read.
        here = self._segment.view(round_.start, round_.nbytes_of(self._rank), question.dtype)
        copy_into_place(self._rank, pieces[0] if len(pieces) == 1 else here)

    def _sums(self, question: Question, shard_buffer: torch.Tensor, rows: torch.Tensor) -> Iterator[Round]:
        sizes = question.sizes
        of_rank = parts(rows, sizes)
        total = sum(sizes)
        for cut in self._pieces(question, [total - size for size in sizes]):
            counts = [piece.stop - piece.start for piece in cut]
            pieces = [part[piece] for part, piece in zip(of_rank, cut, strict=True)]
            yield Sum(question, counts, self._rank, pieces, shard_buffer[cut[self._rank]])

    def _sums_of_wholes(self, question: Question, flat: torch.Tensor) -> Iterator[Round]:
        for cut in self._pieces(question, question.sizes):
            yield SumOfWholes(question, self._rank, flat[cut[0]])

    # The order of things

    def _begin_all(self, rounds: Iterator[Round], async_op: bool) -> Pending | None:
        """Begin the rounds of one collective. Without `async_op`, read each round before the next and finish all."""
        begun: list[Round] = []
        with self._at_work():
            for round_ in rounds:
                if not async_op and begun:
                    self._read_through(begun[-1])
                    if len(begun) >= _ROUNDS_AHEAD:
                        self._retire_through(begun[-_ROUNDS_AHEAD])
                self._begin(round_)
                begun.append(round_)
            if async_op:
                return _Call(self, begun)
            self._finish(begun[-1])
            return None

    def finish(self, rounds: Sequence[Round]) -> None:
        """Read what the others show in `rounds` and in all earlier rounds. Called by `_Call`."""
        with self._at_work():
            self._finish(rounds[-1])

    def _finish(self, last: Round) -> None:
        self._read_through(last)
        if self._unconfirmed > self._limit // 4:
            self._confirm()  # otherwise the next post carries it

    def _begin(self, round_: Round) -> None:
        """Show our bytes to the others, and ask for theirs."""
        # Whether to wait is decided from sizes alone, which all ranks know, never from who has read what: otherwise one
        # rank could wait here for another to read, while that one waits for it elsewhere:
        # test_a_rank_that_shows_nothing_does_not_hold_up_the_others.
        while self._begun and (self._begun_bytes + round_.widest > self._limit or len(self._begun) >= _MOST_ROUNDS):
            self._retire_through(self._begun[0])
        nbytes = round_.nbytes_of(self._rank)
        round_.number, round_.start = self._num_begun, self._room(nbytes)
        round_.fill(self._segment.view(round_.start, nbytes, round_.question.dtype))
        self._neighbours.post(Post(*round_.question.numbers, round_.number, self._num_read, round_.start))
        self._unconfirmed = 0
        self._num_begun += 1
        self._begun_bytes += round_.widest
        self._begun.append(round_)

    def _room(self, nbytes: int) -> int:
        """Returns the start of `nbytes` free bytes, in memory that was used before if possible."""
        self._retire_what_is_read()
        if self._regions.fit(nbytes) + nbytes > self._touched:
            self._neighbours.listen(0)
            self._retire_what_is_read()
        start = self._regions.take(nbytes)
        self._segment.reach(start + nbytes)
        self._touched = max(self._touched, start + nbytes)
        return start

    def _read_through(self, last: Round) -> None:
        """Read all rounds up to `last`, oldest first."""
        while self._num_read <= last.number:
            self._read(self._begun[self._num_read - self._begun[0].number])

    def _read(self, round_: Round) -> None:
        """Take the others' parts in the order of their arrival."""
        missing = self._neighbours.all
        while missing:
            here = [neighbour for neighbour in missing if neighbour.posts]
            for neighbour in here:
                self._take_from(neighbour, round_)
            missing = [neighbour for neighbour in missing if neighbour not in here]
            if missing:
                self._neighbours.wait(missing, lambda neighbour: bool(neighbour.posts), round_.question)
        round_.finish()
        self._num_read += 1
        self._unconfirmed += round_.widest

    def _take_from(self, neighbour: Neighbour, round_: Round) -> None:
        post = neighbour.posts.popleft()
        question = round_.question
        theirs = question.beside(post.question)
        if theirs:
            raise CommError(
                f"ranks diverged in round {round_.number}: rank {self._world_rank} asks for {question}, "
                f"{neighbour.name} for {theirs}; all ranks must use the same modules in the same order"
            )
        assert post.number == round_.number, "posts arrive in order"
        itemsize = question.dtype.itemsize
        first, count = round_.meant_for_us(neighbour.rank)
        round_.take(
            neighbour.rank,
            neighbour.segment.view(post.start + first * itemsize, count * itemsize, question.dtype),
        )

    def _retire_through(self, last: Round) -> None:
        """Read all rounds up to `last`, wait until the others have read them too, and free their memory."""
        self._read_through(last)
        slow = self._slow_readers_of(last)
        if slow:
            self._confirm()  # they may be waiting for our confirmation
        while slow:
            self._neighbours.wait(slow, lambda neighbour: self._has_read(neighbour, last), last.question)
            slow = self._slow_readers_of(last)
        self._retire_what_is_read()

    def _retire_what_is_read(self) -> None:
        while self._begun and self._begun[0].number < self._num_read and not self._slow_readers_of(self._begun[0]):
            oldest = self._begun.popleft()
            nbytes = oldest.nbytes_of(self._rank)
            self._begun_bytes -= oldest.widest
            self._regions.free(oldest.start, nbytes)
            if oldest.start + nbytes > self._limit:
                self._segment.give_back(max(self._regions.end, self._limit))
                self._touched = min(self._touched, max(self._regions.end, self._limit))

    def _slow_readers_of(self, round_: Round) -> list[Neighbour]:
        return [neighbour for neighbour in self._neighbours.all if not self._has_read(neighbour, round_)]

    @staticmethod
    def _has_read(neighbour: Neighbour, round_: Round) -> bool:
        # A rank that has died or left reads nothing any more. One that gave up is an error, which a wait will find.
        return neighbour.read > round_.number or bool(neighbour.fate and not neighbour.gave_up)

    def _confirm(self) -> None:
        self._neighbours.confirm(self._num_read)
        self._unconfirmed = 0

    # Errors

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Lets in one thread at a time. An error inside ends the transport on all ranks."""
        if os.getpid() != self._process:
            raise CommError(
                f"this process ({os.getpid()}) was forked from rank {self._world_rank} (process {self._process}) and "
                "has no part in its collectives; use the model in the parent only"
            )
        with self._lock:
            if self._error:
                raise CommError(self._error)
            try:
                yield
            except BaseException as error:
                self._fail(
                    error.args[0] if isinstance(error, CommError) else f"{type(error).__name__} {error}".rstrip()
                )
                raise

    def _fail(self, why: str) -> None:
        """End the transport, and tell the other ranks why."""
        if not self._error:
            self._neighbours.abort(why)
            self._stop(why)

    def _stop(self, why: str) -> None:
        self._error = why
        self._end()
        for round_ in self._begun:
            round_.forget()
        self._begun.clear()


def _end(neighbours: Neighbours, segment: Segment, process: int) -> None:
    """Leave the group. A forked child only closes what it has inherited."""
    neighbours.close(politely=os.getpid() == process)
    segment.close()
