"""How bytes travel between ranks of one host that have no accelerator: each looks into the memory of the others.

A rank copies what the others are to read into its segment and tells them where (a *round*); each reads it from there,
straight to where it belongs, or adds it up on the way. A collective is one round, or several when it is large:

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

from sherd._torch import adopt_timeout, backend_of
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
)
from sherd.comm.host.segments import Regions, Segment
from sherd.comm.host.sums import can_add, sum_dtype
from sherd.comm.transport import CopyIntoPlace, Pending, Transport, parts
from sherd.errors import CommError

STAGING_LIMIT = 64 << 20
"""How many bytes of a rank may wait to be read. One `all_gather_onto` of more than that takes what it needs."""

_CHUNK = 8 << 20
"""What a large collective stages per round when somebody waits for it. Smaller ones stay in a nearer cache, but cost a
meeting each: of 0.25 to 16 MiB, 4 MiB and more took the least time, the more so where ranks share cores."""

_ROUNDS_AHEAD = 2  # one is read while the next one is filled
_SMALL = 64 << 10
"""Up to here an all-reduce of more than two ranks is cheaper in one round than in two."""

_MOST_ROUNDS = 64  # messages that fit into a socket


class _Call:
    """A collective under way. Dropped before `wait()`, it leaves the caller's memory alone from then on."""

    def __init__(self, transport: SharedMemory, rounds: Sequence[Round]) -> None:
        self._transport = transport
        self._rounds = rounds

    def wait(self) -> None:
        """Return once the results are there; again and again, if called so. Raises CommError."""
        if self._rounds:
            self._transport.finish(self._rounds)
            self._rounds = ()

    def __del__(self) -> None:
        for each in self._rounds:
            each.forget()


class SharedMemory(Transport):
    """CPU ranks of one host; parts may be uneven or empty, and of any dtype.

    Sums are made in rank order; bfloat16 and float16 are added up in float32. A part that `land` gets is the other
    rank's own memory, to be read before `land` returns.

    Raises, from a call or its `wait()`:
        CommError: a rank has died, has given up or stays silent for longer than the group's timeout; or ranks ask for
            different things; or this process was forked from the one that met. It is of no use any more then: every
            further call raises the same error.
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
        """Rounds whose bytes somebody may still have to read, oldest first."""
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
        """The transport of `group`, if all its ranks can look into one another's memory; else None, on all of them.

        All ranks of the group (gloo) call it together. They can if they are on one Linux host, in one network
        namespace and of one user. A wait for another rank may take `timeout`, the group's own if None; `limit` stands
        for `STAGING_LIMIT`.
        """
        adopt_timeout(group)
        segment = _segment(limit)
        found = None
        try:
            found = meet(group, segment, ("sherd shared memory 1", limit, _CHUNK))
        finally:
            if found is None and segment is not None:
                segment.close()
        if found is None:
            return None
        assert segment is not None, "nobody has neighbours without one"
        patience = _timeout_of(group) if timeout is None else timeout
        return cls(group, segment, Neighbours(found, patience.total_seconds()), limit)

    @property
    def nbytes(self) -> int:
        """The memory that this rank holds for others to read, in bytes."""
        return 0 if self._segment.fd < 0 else self._segment.nbytes

    def close(self) -> None:
        """Leave. What others still read of this rank's bytes stays readable; every further call raises CommError."""
        with self._lock:
            if not self._error:
                self._stop("this transport was closed")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32 for the half-precision dtypes."""
        return sum_dtype(dtype)

    def all_gather(
        self, rows: torch.Tensor, rest: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Every part is copied from where its rank shows it; this rank's own from `rest`, unless it is there."""
        question = Question(ALL_GATHER, rest.dtype, tuple(sizes), async_op)
        return self._begin_all(self._gathers(question, rows.detach(), rest.detach()), async_op)

    def all_gather_onto(
        self, copy_into_place: CopyIntoPlace, rest: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """This rank's own part lands before the call returns, the others' in the order in which they are there."""
        question = Question(ALL_GATHER_ONTO, rest.dtype, tuple(sizes), async_op)
        return self._begin_all(self._gather_onto(question, copy_into_place, rest.detach()), async_op)

    def reduce_scatter(
        self, rest: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Every rank adds up its part from where the others show it; `rest` may be this rank's part of `rows`."""
        question = Question(REDUCE_SCATTER, _addable(rows.dtype), tuple(sizes), async_op)
        assert rest.dtype == sum_dtype(rows.dtype), "the caller asks sum_dtype"
        return self._begin_all(self._sums(question, rest.detach(), rows.detach()), async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Pending | None:
        """Small ones, and those of two ranks, are added up everywhere; else every rank adds up a part, at once."""
        _addable(tensor.dtype)
        tensor = tensor.detach()
        flat = tensor.view(-1)
        if self._size > 2 and flat.nbytes > _SMALL:
            self._all_reduce_by_parts(flat)
            return None
        question = Question(ALL_REDUCE, flat.dtype, (flat.numel(),) * self._size, async_op)
        return self._begin_all(self._sums_of_wholes(question, flat), async_op)

    def _all_reduce_by_parts(self, flat: torch.Tensor) -> None:
        cuts = [flat.numel() * rank // self._size for rank in range(self._size + 1)]
        sizes = [cuts[rank + 1] - cuts[rank] for rank in range(self._size)]
        total = torch.empty(sizes[self._rank], dtype=sum_dtype(flat.dtype))
        self.reduce_scatter(total, flat, sizes, async_op=False)
        self.all_gather(flat, total.to(flat.dtype), sizes, async_op=False)

    # What a collective consists of. Its rounds are made as they are begun; after each, what can be done meanwhile.

    def _pieces(self, question: Question, shown: Sequence[int]) -> Iterator[list[slice]]:
        """Where each rank's part is cut for each round; `shown` is how many elements each rank would stage in one."""
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

    def _gathers(self, question: Question, rows: torch.Tensor, rest: torch.Tensor) -> Iterator[Round]:
        into = parts(rows, question.sizes)
        own = into[self._rank]
        is_there = own.data_ptr() == rest.data_ptr()
        for cut in self._pieces(question, question.sizes):
            here = cut[self._rank]
            shown = [each.stop - each.start for each in cut]
            yield Gather(question, shown, rest[here], _into_place(into, cut))
            if not is_there:
                own[here].copy_(rest[here])

    def _gather_onto(self, question: Question, copy_into_place: CopyIntoPlace, rest: torch.Tensor) -> Iterator[Round]:
        yield Gather(question, question.sizes, rest, copy_into_place)
        copy_into_place(self._rank, rest)

    def _sums(self, question: Question, rest: torch.Tensor, rows: torch.Tensor) -> Iterator[Round]:
        sizes = question.sizes
        of_rank = parts(rows, sizes)
        total = sum(sizes)
        for cut in self._pieces(question, [total - size for size in sizes]):
            counts = [each.stop - each.start for each in cut]
            pieces = [part[each] for part, each in zip(of_rank, cut, strict=True)]
            yield Sum(question, counts, self._rank, pieces, rest[cut[self._rank]])

    def _sums_of_wholes(self, question: Question, flat: torch.Tensor) -> Iterator[Round]:
        for cut in self._pieces(question, question.sizes):
            yield SumOfWholes(question, self._rank, flat[cut[0]])

    # The order of things

    def _begin_all(self, rounds: Iterator[Round], async_op: bool) -> Pending | None:
        """Begin the rounds of one collective; without `async_op` read each before the next, and finish them."""
        begun: list[Round] = []
        with self._at_work():
            for each in rounds:
                if not async_op and begun:
                    self._read_through(begun[-1])
                    if len(begun) >= _ROUNDS_AHEAD:
                        self._retire_through(begun[-_ROUNDS_AHEAD])
                self._begin(each)
                begun.append(each)
            if async_op:
                return _Call(self, begun)
            self._finish(begun[-1])
            return None

    def finish(self, rounds: Sequence[Round]) -> None:
        """Read what the others show in `rounds`, and in those before; for `_Call`."""
        with self._at_work():
            self._finish(rounds[-1])

    def _finish(self, last: Round) -> None:
        self._read_through(last)
        if self._unconfirmed > self._limit // 4:
            self._confirm()  # else the next post says it

    def _begin(self, round_: Round) -> None:
        """Show the others our bytes, and ask for theirs."""
        # All ranks come to the same answer, whatever each of them has waited for, for they know each other's sizes.
        # Would one have to wait here for what another one has yet to read, while that one need not, then the other
        # one might be waiting for us elsewhere: test_a_rank_that_shows_nothing_does_not_hold_up_the_others.
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
        """Where `nbytes` find room, in memory that was used before if possible."""
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
        """Take the others' parts as they come."""
        missing = self._neighbours.all
        while missing:
            here = [each for each in missing if each.posts]
            for each in here:
                self._take_from(each, round_)
            missing = [each for each in missing if each not in here]
            if missing:
                self._neighbours.wait(missing, _has_posted, round_.question)
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
        """Read all rounds up to `last`, and wait until the others have read them too; their memory is free then."""
        self._read_through(last)
        slow = self._slow_readers_of(last)
        if slow:
            self._confirm()  # they may be waiting for the same of us
        while slow:
            self._neighbours.wait(slow, lambda each: self._has_read(each, last), last.question)
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
        return [each for each in self._neighbours.all if not self._has_read(each, round_)]

    @staticmethod
    def _has_read(neighbour: Neighbour, round_: Round) -> bool:
        # One that has died or left will not read any more. One that gave up is an error, which a wait will find.
        return neighbour.read > round_.number or bool(neighbour.fate and not neighbour.gave_up)

    def _confirm(self) -> None:
        self._neighbours.confirm(self._num_read)
        self._unconfirmed = 0

    # Errors

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One thread at a time; what goes wrong here ends the transport on all ranks."""
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
        """Be of no use from now on, and tell the others."""
        if not self._error:
            self._neighbours.abort(why)
            self._stop(why)

    def _stop(self, why: str) -> None:
        self._error = why
        self._end()
        for each in self._begun:
            each.forget()
        self._begun.clear()


def _end(neighbours: Neighbours, segment: Segment, process: int) -> None:
    """Leave; a forked child only closes what it has inherited."""
    neighbours.close(politely=os.getpid() == process)
    segment.close()


def _has_posted(neighbour: Neighbour) -> bool:
    return bool(neighbour.posts)


def _into_place(into: Sequence[torch.Tensor], cut: Sequence[slice]) -> CopyIntoPlace:
    def copy_into_place(rank: int, part: torch.Tensor) -> None:
        into[rank][cut[rank]].copy_(part)

    return copy_into_place


def _addable(dtype: torch.dtype) -> torch.dtype:
    if not can_add(dtype):
        raise CommError(f"torch cannot add up {dtype} on a CPU; reduce in another dtype")
    return dtype


def _segment(limit: int) -> Segment | None:
    """Memory to show, or None on a platform without."""
    try:
        return Segment.new(limit)
    except (AttributeError, OSError):
        return None


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the group was made with."""
    options = getattr(backend_of(group, torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", dist.default_pg_timeout)
    assert isinstance(timeout, timedelta), "torch keeps it as one"
    return timeout
