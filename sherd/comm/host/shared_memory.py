r"""The transport between CPU ranks of one host: each rank reads the memory of the others.

In a *round* every rank copies the bytes for the others into its segment and posts to them where these are. The others
copy them from it straight to where they belong, or add them up on the way. A large collective is several rounds:

    rank 0   fill, post ----.   .--- read rank 1's, say so
                             \ /
    rank 1   fill, post -----'-'---- read rank 0's, say so          memory is filled again when all have read it
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from sherd._torch import adopt_timeout, timeout_of
from sherd.comm.host.neighbours import Neighbour, Neighbours, Post, meet
from sherd.comm.host.segments import Regions, Segment, new_segment
from sherd.comm.host.sums import add_onto, add_up, addable, collect, sum_dtype
from sherd.comm.transport import CopyIntoPlace, InPieces, Pending, Transport, parts
from sherd.errors import CommError

STAGING_LIMIT = 64 << 20
"""The most bytes of a rank that may wait to be read; a larger `all_gather_onto` takes as many as it needs."""

# Bytes that a large collective stages per round, if the caller waits for it. Smaller rounds stay in a nearer cache, but
# each costs a meeting: of 0.25 to 16 MiB, 4 MiB and more took the least time, above all on shared cores.
_CHUNK = 8 << 20

_ROUNDS_AHEAD = 2  # one is read while the next one is filled
_SMALL = 64 << 10  # up to here an all-reduce of more than two ranks is cheaper in one round than in two
_MOST_ROUNDS = 64  # messages that fit into a socket


# Rounds: what each rank shows the others in one exchange, and how it takes their parts. No order, no messages.

_ALL_GATHER, _ALL_GATHER_ONTO, _REDUCE_SCATTER, _ALL_REDUCE, _ADD_ONTO, _EXCHANGE = range(6)
_NAMES = ("all-gather", "all-gather", "reduce-scatter", "all-reduce", "sum in the order of ranks", "all-to-all")
# Sorted, so that a dtype has the same number on all ranks.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


class _Question:
    """The collective that a rank asks for, which must be the same on all ranks."""

    def __init__(self, op: int, dtype: torch.dtype, sizes: tuple[int, ...], is_async: bool) -> None:
        self.dtype = dtype
        self.sizes = sizes
        self.is_async = is_async
        digest, total = _digest(sizes)
        self.numbers = (op, _NUMBER_OF[dtype], int(is_async), digest, total * dtype.itemsize)
        """The first fields of a post."""

    def __str__(self) -> str:
        return _described(*self.numbers)

    def difference_to(self, theirs: tuple[int, ...]) -> str:
        """Returns another rank's question in words if it differs from this one; else ""."""
        if theirs == self.numbers:
            return ""
        described = _described(*theirs)
        return described if described != str(self) else f"{described} in parts of other sizes, or not at once"


@lru_cache(maxsize=1024)  # the sizes of a unit are the same in every step
def _digest(sizes: tuple[int, ...]) -> tuple[int, int]:
    return zlib.crc32(repr(sizes).encode()), sum(sizes)


def _described(op: int, dtype: int, is_async: int, digest: int, total: int) -> str:
    return f"{_NAMES[op]} of {total:,} bytes of {str(_DTYPES[dtype]).removeprefix('torch.')}"


class _Round(ABC):
    """One exchange: what this rank shows, and what it does with the parts that the others show."""

    number: int
    start: int
    """Where this rank's part begins in its segment."""

    def __init__(self, question: _Question, shown: Sequence[int]) -> None:
        self.question = question
        self._itemsize = question.dtype.itemsize
        self.show(shown)

    def show(self, shown: Sequence[int]) -> None:
        """Set how many elements each rank stages."""
        self.shown = shown
        self.widest = max(shown) * self._itemsize
        """The bytes of the largest stage, the same number on all ranks."""

    def nbytes_of(self, rank: int) -> int:
        return self.shown[rank] * self._itemsize

    @abstractmethod
    def fill(self, stage: Tensor) -> None:
        """Copy this rank's elements for the others, `shown[own rank]` of them, to `stage`."""

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        """Returns the first element in `rank`'s stage for this rank, and their number; by default all of the stage."""
        return 0, self.shown[rank]

    @abstractmethod
    def take(self, rank: int, part: Tensor) -> None:
        """Take `rank`'s part, which stays readable until `finish` has returned."""

    def finish(self) -> None:
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Drop the result, which is not wanted, and leave the caller's memory alone. Called on any thread."""


class _Gather(_Round):
    """Every rank shows its part to all. This rank's part is in `pieces`."""

    def __init__(
        self, question: _Question, shown: Sequence[int], pieces: Sequence[Tensor], copy_into_place: CopyIntoPlace
    ) -> None:
        super().__init__(question, shown)
        self._pieces = pieces
        self._copy_into_place: CopyIntoPlace | None = copy_into_place

    def fill(self, stage: Tensor) -> None:
        assert self._pieces, "filled once"
        if len(self._pieces) == 1:
            stage.copy_(self._pieces[0])
        else:
            torch.cat(list(self._pieces), out=stage)
        self._pieces = ()

    def take(self, rank: int, part: Tensor) -> None:
        copy_into_place = self._copy_into_place  # read once: another thread may forget the round meanwhile
        if copy_into_place is not None:
            copy_into_place(rank, part)

    def forget(self) -> None:
        self._copy_into_place = None


class _Sum(_Round):
    """Every rank shows each other rank its contribution to that rank's part, in the order of ranks.

    rank 1's stage, of three ranks   | for rank 0 | for rank 2 |
    """

    def __init__(
        self, question: _Question, counts: Sequence[int], own: int, pieces: Sequence[Tensor], out: Tensor
    ) -> None:
        super().__init__(question, [sum(counts) - count for count in counts])
        self._add = {_ADD_ONTO: add_onto, _EXCHANGE: collect}.get(question.numbers[0], add_up)
        self._counts = counts
        self._own = own
        self._pieces: list[Tensor] = list(pieces)
        self._out: Tensor | None = out

    def fill(self, stage: Tensor) -> None:
        start = 0
        for rank, piece in enumerate(self._pieces):
            if rank != self._own:
                stage[start : start + piece.numel()].copy_(piece)
                start += piece.numel()
        # The tensors for the others are staged. From now on the list holds the summands of this rank's own part.
        self._pieces = [self._pieces[self._own]] * len(self._pieces)

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        before = sum(self._counts[: self._own])
        return before - (self._counts[rank] if rank < self._own else 0), self._counts[self._own]

    def take(self, rank: int, part: Tensor) -> None:
        self._pieces[rank] = part

    def finish(self) -> None:
        out = self._out  # read once, as above
        if out is not None:
            self._add(self._pieces, out)
        self._pieces, self._out = [], None  # they look into the others' segments

    def forget(self) -> None:
        self._out = None


class _SumOfWholes(_Sum):
    """Every rank shows its full tensor to all, and each rank adds up all of them."""

    def __init__(self, question: _Question, own: int, tensor: Tensor) -> None:
        num_ranks = len(question.sizes)
        super().__init__(question, [tensor.numel()] * num_ranks, own, [tensor] * num_ranks, tensor)
        self.show([tensor.numel()] * num_ranks)

    def fill(self, stage: Tensor) -> None:
        stage.copy_(self._pieces[self._own])

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        return 0, self.shown[rank]


def _copier_into(parts: Sequence[Tensor], cut: Sequence[slice]) -> CopyIntoPlace:
    """Returns the function that copies a rank's elements to its slice of `cut` in its tensor of `parts`."""

    def copy_into_place(rank: int, part: Tensor) -> None:
        parts[rank][cut[rank]].copy_(part)

    return copy_into_place


# The transport


class _Call:
    """A collective under way. If it is dropped before `wait()`, it no longer writes to the caller's memory."""

    def __init__(self, transport: SharedMemory, rounds: Sequence[_Round]) -> None:
        self._transport = transport
        self._rounds = rounds

    def wait(self) -> None:
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

    A call or its `wait()` raises CommError if a rank has died, has given up or stays silent for longer than the group's
    timeout; if ranks ask for different collectives; or if this process was forked from the one that called `meet`.
    Every further call then raises the same error.
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
        self._begun: deque[_Round] = deque()
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

        Ranks can on one Linux host, in one network namespace and with one user. All ranks of the group, which is on
        gloo, must make this call.

        Args:
            group: the ranks.
            timeout: how long to wait for another rank; None means the group's own timeout.
            limit: see `STAGING_LIMIT`.
        """
        adopt_timeout(group)
        segment = new_segment(limit)
        neighbours = None
        try:
            neighbours = meet(group, segment, ("sherd shared memory 1", limit, _CHUNK))
        finally:
            if neighbours is None and segment is not None:
                segment.close()
        if neighbours is None:
            return None
        assert segment is not None, "no rank has neighbours without one"
        if timeout is None:
            timeout = timeout_of(group, torch.device("cpu")) or dist.default_pg_timeout
        return cls(group, segment, Neighbours(neighbours, timeout.total_seconds()), limit)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for the others to read."""
        return 0 if self._segment.fd < 0 else self._segment.nbytes

    def close(self) -> None:
        """Leave the group: every further call raises CommError. The others can still read what this rank has shown."""
        with self._lock:
            if not self._error:
                self._stop("this transport was closed")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns float32 for bfloat16 and float16, else the dtype itself."""
        return sum_dtype(dtype)

    def all_gather(self, rows: Tensor, shard_buffer: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Copy every part from its rank's segment, and this rank's own from `shard_buffer` unless it is in place."""
        question = _Question(_ALL_GATHER, shard_buffer.dtype, tuple(sizes), async_op)
        return self._begin_all(self._gathers(question, rows.detach(), shard_buffer.detach()), async_op)

    def all_gather_onto(
        self, copy_into_place: CopyIntoPlace, shard_buffer: InPieces, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Place this rank's own part before the call returns, and the others' in the order of their arrival."""
        given = [shard_buffer] if isinstance(shard_buffer, Tensor) else shard_buffer
        pieces = [piece.detach() for piece in given]
        question = _Question(_ALL_GATHER_ONTO, pieces[0].dtype, tuple(sizes), async_op)
        return self._begin_all(self._gather_onto(question, copy_into_place, pieces), async_op)

    def reduce_scatter(
        self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        """Add up this rank's part from the others' segments. `shard_buffer` may be this rank's part of `rows`."""
        question = _Question(_REDUCE_SCATTER, addable(rows.dtype), tuple(sizes), async_op)
        assert shard_buffer.dtype == sum_dtype(rows.dtype), "the caller asks sum_dtype"
        return self._begin_all(self._sums(question, shard_buffer.detach(), rows.detach()), async_op)

    def add_onto(self, shard_buffer: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Add this rank's part from the others' segments, and its own."""
        question = _Question(_ADD_ONTO, addable(rows.dtype), tuple(sizes), async_op)
        return self._begin_all(self._sums(question, shard_buffer.detach(), rows.detach()), async_op)

    def exchange(self, versions: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        """Copy this rank's part from the others' segments, and its own."""
        question = _Question(_EXCHANGE, rows.dtype, tuple(sizes), async_op)
        return self._begin_all(self._sums(question, versions.detach(), rows.detach()), async_op)

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        """Add up small tensors, and those of two ranks, on every rank. Large tensors are done when the call returns."""
        flat = tensor.detach().view(-1)
        addable(flat.dtype)
        if self._size > 2 and flat.nbytes > _SMALL:
            cuts = [flat.numel() * rank // self._size for rank in range(self._size + 1)]
            sizes = [cuts[rank + 1] - cuts[rank] for rank in range(self._size)]
            total = torch.empty(sizes[self._rank], dtype=sum_dtype(flat.dtype))
            self.reduce_scatter(total, flat, sizes, async_op=False)
            self.all_gather(flat, total.to(flat.dtype), sizes, async_op=False)
            return None
        question = _Question(_ALL_REDUCE, flat.dtype, (flat.numel(),) * self._size, async_op)
        return self._begin_all(self._sums_of_wholes(question, flat), async_op)

    # The rounds of each collective. Each generator yields a round to begin, then does what needs no other rank.

    def _cuts(self, question: _Question, shown: Sequence[int]) -> Iterator[list[slice]]:
        """Yields each rank's slice for each round. `shown` is how many elements each rank would stage in one round."""
        sizes, itemsize = question.sizes, question.dtype.itemsize
        most = max(shown) * itemsize
        longest = max(sizes)
        if most > (self._limit if question.is_async else 2 * _CHUNK):
            num_rounds = -(-most // _CHUNK)
            step = -(-longest // num_rounds)
        else:
            step = max(longest, 1)
        # At least one round, even of nothing, so that all ranks post and read equally many.
        for start in range(0, max(longest, 1), step):
            yield [slice(min(start, size), min(start + step, size)) for size in sizes]

    def _gathers(self, question: _Question, rows: Tensor, shard_buffer: Tensor) -> Iterator[_Round]:
        into = parts(rows, question.sizes)
        own = into[self._rank]
        is_in_place = own.data_ptr() == shard_buffer.data_ptr()
        for cut in self._cuts(question, question.sizes):
            own_part = cut[self._rank]
            shown = [piece.stop - piece.start for piece in cut]
            yield _Gather(question, shown, [shard_buffer[own_part]], _copier_into(into, cut))
            if not is_in_place:
                own[own_part].copy_(shard_buffer[own_part])

    def _gather_onto(
        self, question: _Question, copy_into_place: CopyIntoPlace, pieces: Sequence[Tensor]
    ) -> Iterator[_Round]:
        round_ = _Gather(question, question.sizes, pieces, copy_into_place)
        yield round_
        # Several tensors are one part in the segment, which is not freed before this rank has read the round.
        staged = self._segment.view(round_.start, round_.nbytes_of(self._rank), question.dtype)
        copy_into_place(self._rank, pieces[0] if len(pieces) == 1 else staged)

    def _sums(self, question: _Question, shard_buffer: Tensor, rows: Tensor) -> Iterator[_Round]:
        sizes = question.sizes
        of_rank = parts(rows, sizes)
        total = sum(sizes)
        for cut in self._cuts(question, [total - size for size in sizes]):
            counts = [piece.stop - piece.start for piece in cut]
            pieces = [part[piece] for part, piece in zip(of_rank, cut, strict=True)]
            yield _Sum(question, counts, self._rank, pieces, shard_buffer[..., cut[self._rank]])

    def _sums_of_wholes(self, question: _Question, flat: Tensor) -> Iterator[_Round]:
        for cut in self._cuts(question, question.sizes):
            yield _SumOfWholes(question, self._rank, flat[cut[0]])

    # The order of things

    def _begin_all(self, rounds: Iterator[_Round], async_op: bool) -> Pending | None:
        """Begin the rounds of one collective. Without `async_op`, read each round before the next, and finish all."""
        begun: list[_Round] = []
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

    def finish(self, rounds: Sequence[_Round]) -> None:
        """Read what the others show in `rounds` and in all earlier rounds. Called by `_Call`."""
        with self._at_work():
            self._finish(rounds[-1])

    def _finish(self, last: _Round) -> None:
        self._read_through(last)
        if self._unconfirmed > self._limit // 4:  # otherwise the next post confirms soon enough
            self._confirm()

    def _begin(self, round_: _Round) -> None:
        # Sizes, which all ranks know, decide whether to wait, never who has read what. Otherwise one rank could wait
        # here for another to read, while the other one waits for it elsewhere:
        # test_a_rank_that_shows_nothing_does_not_hold_up_the_others.
        while self._begun and (self._begun_bytes + round_.widest > self._limit or len(self._begun) >= _MOST_ROUNDS):
            self._retire_through(self._begun[0])
        nbytes = round_.nbytes_of(self._rank)
        self._retire_what_is_read()
        if self._regions.fit(nbytes) + nbytes > self._touched:
            # Before new pages are touched: a message may have come that older bytes are read.
            self._neighbours.listen(0)
            self._retire_what_is_read()
        round_.number, round_.start = self._num_begun, self._regions.take(nbytes)
        self._segment.reach(round_.start + nbytes)
        self._touched = max(self._touched, round_.start + nbytes)
        round_.fill(self._segment.view(round_.start, nbytes, round_.question.dtype))
        self._neighbours.post(Post(*round_.question.numbers, round_.number, self._num_read, round_.start))
        self._unconfirmed = 0
        self._num_begun += 1
        self._begun_bytes += round_.widest
        self._begun.append(round_)

    def _read_through(self, last: _Round) -> None:
        while self._num_read <= last.number:
            self._read(self._begun[self._num_read - self._begun[0].number])

    def _read(self, round_: _Round) -> None:
        """Take the others' parts in the order of their arrival."""
        missing = self._neighbours.all
        while missing:
            arrived = [neighbour for neighbour in missing if neighbour.posts]
            for neighbour in arrived:
                self._take_from(neighbour, round_)
            missing = [neighbour for neighbour in missing if neighbour not in arrived]
            if missing:
                self._neighbours.wait(missing, lambda neighbour: bool(neighbour.posts), round_.question)
        round_.finish()
        self._num_read += 1
        self._unconfirmed += round_.widest

    def _take_from(self, neighbour: Neighbour, round_: _Round) -> None:
        post = neighbour.posts.popleft()
        question = round_.question
        theirs = question.difference_to(post.question)
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

    def _retire_through(self, last: _Round) -> None:
        """Read all rounds up to `last`, wait until the others have read them too, and free their memory."""
        self._read_through(last)
        slow = self._slow_readers_of(last)
        if slow:
            self._confirm()  # they may be waiting for this rank's confirmation
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

    def _slow_readers_of(self, round_: _Round) -> list[Neighbour]:
        return [neighbour for neighbour in self._neighbours.all if not self._has_read(neighbour, round_)]

    @staticmethod
    def _has_read(neighbour: Neighbour, round_: _Round) -> bool:
        # A rank that has died or left reads nothing any more. A rank that gave up is an error, which a wait will raise.
        return neighbour.read > round_.number or bool(neighbour.fate and not neighbour.gave_up)

    def _confirm(self) -> None:
        self._neighbours.confirm(self._num_read)
        self._unconfirmed = 0

    # Errors

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A context for one thread at a time. An error inside ends the transport on all ranks."""
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
                why = error.args[0] if isinstance(error, CommError) else f"{type(error).__name__} {error}".rstrip()
                if not self._error:
                    self._neighbours.abort(why)
                    self._stop(why)
                raise

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
