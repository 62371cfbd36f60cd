"""State that rests in scratch files: read ahead of the chunk that is stepped, and written behind it."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from typing import NoReturn

import torch

from sherd._torch import users_stacklevel
from sherd.policy import Disk
from sherd.storage.scratch import Request, Scratch, ScratchFile
from sherd.tensor.ragged import memory_of

DEPTH = 8
"""Requests under way at a time: AdamW's for one chunk that comes and one that goes, twice."""
WRITES = 4
"""Those of them that may be writes, whose buffers are not free."""


class DiskVectors:
    """Vectors in scratch files, which are mapped: whatever reads one finds its values, at the latest after `settle`."""

    def __init__(self, path: str) -> None:
        self._scratch = Scratch(path, depth=DEPTH, stacklevel=users_stacklevel(sys._getframe()))
        self.file_system = os.stat(self._scratch.path).st_dev
        """Its number: folders with the same one share their space."""
        self._files: dict[int, ScratchFile] = {}  # by the address of the vector
        self._writing: deque[tuple[Request, torch.Tensor, bool]] = deque()
        self._lock = threading.Lock()
        self._free_buffers: defaultdict[tuple[int, torch.dtype, bool], list[torch.Tensor]] = defaultdict(list)

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
        vector = torch.frombuffer(mapped, dtype=dtype, count=numel)  # its memory holds `mapped`
        self._files[vector.data_ptr()] = file
        weakref.finalize(mapped, self._free, vector.data_ptr()).atexit = False
        return vector

    def _free(self, address: int) -> None:
        self._files.pop(address).close()

    def has(self, vector: torch.Tensor) -> bool:
        """Returns True for a vector that `empty` has returned, and for a part of one."""
        return not vector.numel() or self._place_of(vector) is not None

    def _place_of(self, vector: torch.Tensor) -> tuple[ScratchFile, int] | None:
        """Returns the file that has the vector, and the byte where it begins."""
        begin = vector.data_ptr()
        if begin in self._files:
            return self._files[begin], 0
        for address, file in list(self._files.items()):
            if address < begin < address + file.nbytes:
                return file, begin - address
        return None

    def buffer(self, numel: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Returns host memory to read into and to write from: that of an earlier write of this step, if one is over."""
        with self._lock:
            if free := self._free_buffers[numel, dtype, pinned]:
                return free.pop()
        return torch.empty(numel, dtype=dtype, pin_memory=pinned)

    def read(self, vector: torch.Tensor, start: int, buffer: torch.Tensor) -> Request:
        """Begin to fill `buffer`, in host memory, with the elements from `start` on of a vector of this object."""
        file, at = self._place_of(vector) or _missing()
        return file.read_into(memory_of(buffer), at + start * vector.itemsize)

    def write(self, vector: torch.Tensor, start: int, buffer: torch.Tensor, pinned: bool = False) -> None:
        """Begin to write `buffer`, in host memory, to the elements from `start` on. Raises errors of earlier writes.

        `pinned`: with what `buffer` was asked for.
        """
        file, at = self._place_of(vector) or _missing()
        with self._lock:
            self._writing.append((file.write_from(memory_of(buffer), at + start * vector.itemsize), buffer, pinned))
        self._wait(WRITES)

    def _wait(self, most: int) -> None:
        """Wait for the oldest writes, until at most so many are under way."""
        with self._lock:
            while len(self._writing) > most:
                request, buffer, pinned = self._writing.popleft()
                request.wait()
                self._free_buffers[buffer.numel(), buffer.dtype, pinned].append(buffer)

    def settle(self) -> None:
        """Return once all has been written. Raises ScratchError."""
        self._wait(0)
        self._free_buffers.clear()


def _missing() -> NoReturn:
    raise AssertionError("vectors are read and written where they were made")


_by_path: dict[str, DiskVectors] = {}


def vectors_on(disk: Disk) -> DiskVectors:
    """Returns the vectors of this process in a folder. Raises ScratchError if it cannot be used."""
    if disk.path not in _by_path:
        _by_path.setdefault(disk.path, DiskVectors(disk.path))  # another thread may have made them meanwhile
    return _by_path[disk.path]
