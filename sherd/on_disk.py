"""Vectors that rest in scratch files: read ahead of their use into buffers in host memory, and written behind it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from sherd._torch import users_stacklevel
from sherd.comm.agreement import failing_together
from sherd.comm.failures import own_rank
from sherd.policy import Disk
from sherd.storage.scratch import PAGE, Request, Scratch, ScratchFile
from sherd.tensor.ragged import memory_of

DEPTH = 8
"""Requests under way at a time: AdamW's for one chunk that comes and one that goes, twice."""
WRITES = 2
"""Those of them that may be writes, whose buffers are not free."""


class DiskVectors:
    """Vectors in scratch files, which are mapped: whatever reads one finds its values, at the latest after `settle`."""

    def __init__(self, path: str) -> None:
        self._scratch = Scratch(path, depth=DEPTH, stacklevel=users_stacklevel(sys._getframe()))
        self.file_system = os.stat(self._scratch.path).st_dev
        """Its number: folders with the same one share their space."""
        self._files: dict[int, tuple[ScratchFile, mmap.mmap]] = {}  # by the address of the vector
        self._writing: deque[tuple[Request, torch.Tensor]] = deque()
        self._lock = threading.Lock()
        self._free_buffers: defaultdict[Kind, list[torch.Tensor]] = defaultdict(list)
        self._in_turn: dict[int, _InTurn] = {}  # by rank: threads may be ranks

    def require(self, nbytes: int) -> None:
        """Raises ScratchError unless `nbytes` of each rank of this host are free."""
        self._scratch.require(nbytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a vector of zeros in a file of its own, which lives as long. Messages call it `name`.

        Raises:
            ScratchError: the disk has no space for it.
        """
        if not numel:
            return torch.empty(0, dtype=dtype)
        file = self._scratch.file(name, numel * dtype.itemsize)
        mapped = file.map()
        seen = memoryview(mapped)
        vector = torch.frombuffer(seen, dtype=dtype, count=numel)  # its memory holds `seen`
        # Until the address is forgotten: once it is unmapped, another thread may get it.
        self._files[vector.data_ptr()] = file, mapped
        weakref.finalize(seen, self._free, vector.data_ptr()).atexit = False
        return vector

    def _free(self, address: int) -> None:
        file, _ = self._files.pop(address)
        file.close()

    def has(self, vector: torch.Tensor) -> bool:
        """Returns True for a vector that `empty` has returned, and for a part of one."""
        return not vector.numel() or self._place_of(vector) is not None

    def _place_of(self, vector: torch.Tensor) -> tuple[ScratchFile, int] | None:
        """Returns the file that has the vector, and the byte where it begins."""
        begin = vector.data_ptr()
        if begin in self._files:
            return self._files[begin][0], 0
        for address, (file, _) in self._files.copy().items():
            if address < begin < address + file.nbytes:
                return file, begin - address
        return None

    def buffer(self, start: int, numel: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Returns host memory for `numel` elements of a vector, those from `start` on: that of a write that is over."""
        kind = numel * dtype.itemsize, start * dtype.itemsize % PAGE, pinned
        with self._lock:
            if not self._free_buffers[kind]:
                self._free_buffers.clear()  # chunks have other sizes now
                self._free_buffers[kind].append(_meeting(*kind))
            return self._free_buffers[kind].pop().view(dtype)

    def read(self, vector: torch.Tensor, start: int, buffer: torch.Tensor) -> Request:
        """Begin to fill `buffer`, in host memory, with the elements from `start` on of a vector of this object."""
        file, at = self._place_of(vector) or _missing()
        return file.read_into(memory_of(buffer), at + start * vector.itemsize)

    def at_hand(self, user: User, pinned: bool, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
        """Returns the vector of `user` in host memory, which is its own. The next one is read meanwhile.

        All ranks of the axes `groups` of a mesh must call this.

        Raises:
            ScratchError: on all of them, if one could not read its own.
        """
        with failing_together(groups, "the reads of parameters from disks"):
            if not user.shard_buffer.numel():
                return user.shard_buffer
            if (rank := own_rank()) not in self._in_turn:
                self._in_turn[rank] = _InTurn(self)
            return self._in_turn[rank].take(user, pinned)

    def write(self, vector: torch.Tensor, start: int, buffer: torch.Tensor) -> None:
        """Begin to write a `buffer` to the elements from `start` on. Raises errors of earlier writes."""
        file, at = self._place_of(vector) or _missing()
        with self._lock:
            self._writing.append((file.write_from(memory_of(buffer), at + start * vector.itemsize), buffer))
        self._wait(WRITES)

    def _wait(self, most: int) -> None:
        """Wait for the oldest writes, until at most so many are under way."""
        with self._lock:
            while len(self._writing) > most:
                request, buffer = self._writing.popleft()
                request.wait()
                kind = buffer.nbytes, buffer.data_ptr() % PAGE, buffer.is_pinned()
                self._free_buffers[kind].append(buffer.view(torch.uint8))

    def settle(self) -> None:
        """Return once all has been written. Raises ScratchError."""
        self._wait(0)
        with self._lock:
            self._free_buffers.clear()


class User(Protocol):
    """The user of a vector on a disk, its `shard_buffer`; each write changes `version`."""

    @property
    def shard_buffer(self) -> torch.Tensor: ...

    @property
    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Read:
    """A vector that is read into `buffer`, for its `user` as of `version`."""

    user: weakref.ref[User]
    version: int
    request: Request
    buffer: torch.Tensor


class _InTurn:
    """Vectors whose users take turns: what came after two others is read when these two have come again."""

    def __init__(self, vectors: DiskVectors) -> None:
        self._read = vectors.read
        self._last: tuple[weakref.ref[User], ...] = ()
        self._next: dict[tuple[weakref.ref[User], ...], weakref.ref[User] | None] = {}
        self._ahead: _Read | None = None

    def take(self, user: User, pinned: bool) -> torch.Tensor:
        """Returns the vector of `user`, and begins to read the next one, if it is known."""
        me, mine, self._ahead = weakref.ref(user), self._ahead, None
        if mine is not None:
            mine.request.wait()
        came_next = mine is not None and mine.user == me
        if mine is None or not came_next or mine.version != user.version:
            mine = self._begin(user, pinned)
            mine.request.wait()
            # An optimizer always steps between these two, if what was read ahead is old.
            learns = self._next.get(self._last, me) is not None
            self._next[self._last] = me if learns and not came_next else None
        self._last = (*self._last, me)[-2:]
        following = self._next.get(self._last)
        if following is not None and (other := following()) is not None:
            self._ahead = self._begin(other, pinned)
        return mine.buffer

    def _begin(self, user: User, pinned: bool) -> _Read:
        vector = user.shard_buffer
        buffer = _meeting(vector.nbytes, 0, pinned).view(vector.dtype)
        return _Read(weakref.ref(user), user.version, self._read(vector, 0, buffer), buffer)


Kind = tuple[int, int, bool]
"""Of a buffer: its bytes, where in a page it begins, and whether it is page-locked."""


def _meeting(nbytes: int, at: int, pinned: bool) -> torch.Tensor:
    """Returns host memory, uint8 `[nbytes]`, which begins at byte `at` of a page."""
    if pinned:
        memory = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8, pin_memory=True)
    else:
        pages = mmap.mmap(-1, nbytes + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A process that is forked while the disk writes a page could else take the page with it.
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    begin = (at - memory.data_ptr()) % PAGE
    return memory[begin : begin + nbytes]


def _missing() -> NoReturn:
    raise AssertionError("vectors are read and written where they were made")


_by_path: dict[str, DiskVectors] = {}


def vectors_on(disk: Disk) -> DiskVectors:
    """Returns the vectors of this process in a folder. Raises ScratchError if it cannot be used."""
    if disk.path not in _by_path:
        _by_path.setdefault(disk.path, DiskVectors(disk.path))  # another thread may have made them meanwhile
    return _by_path[disk.path]
