"""Memory that the ranks of one host read from one another. It has no name, and its lowest free bytes are used first.

A segment is an anonymous file in memory (`memfd`): it is in no folder, is not bound by the size of /dev/shm, and is
gone as soon as no process has it open or mapped, however these end. Pages that were never written take no memory.
"""

from __future__ import annotations

import mmap
import os

import torch

_ALIGNMENT = 128  # two cache lines, which processors fetch together


class Segment:
    """Shared memory, by its file descriptor; every process that has one maps it for itself."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._remap()

    @classmethod
    def new(cls, nbytes: int) -> Segment:
        """Returns a segment of `nbytes` addresses, without memory so far. Raises OSError where there is none."""
        fd = os.memfd_create("sherd", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns bytes `start` to `start + nbytes` as a 1-D tensor. Maps a segment again that its owner has grown."""
        if start + nbytes > self._bytes.numel():
            self._remap()
        return self._bytes[start : start + nbytes].view(dtype)

    def reach(self, nbytes: int) -> None:
        """Have at least `nbytes` addresses. Views of the earlier mapping stay valid: the pages are the same."""
        if nbytes > self._bytes.numel():
            os.ftruncate(self.fd, nbytes)
            self._remap()

    def give_back(self, start: int) -> None:
        """Take no more memory for what lies at `start` and above; the addresses stay, and read as zeros."""
        first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if first_page < len(self._map):
            self._map.madvise(mmap.MADV_REMOVE, first_page)

    @property
    def nbytes(self) -> int:
        """The memory it takes, in whole pages."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last tensor that looks into it."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _remap(self) -> None:
        # Never closed by hand: closing what a tensor looks into is an error. It goes with its last tensor.
        self._map = mmap.mmap(self.fd, 0)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class Regions:
    """The bytes of an endless line that are taken. New regions lie as low as they fit, where memory is warm.

    | taken | free | taken | free ...      take(2) -> the first gap that is wide enough
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # start, end; by start

    def fit(self, nbytes: int) -> int:
        """Returns where `nbytes` would begin."""
        lowest = 0
        for start, end in self._taken:
            if lowest + nbytes <= start:
                break
            lowest = end
        return lowest

    def take(self, nbytes: int) -> int:
        """Take `nbytes`. Returns where they begin."""
        width = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self.fit(width)
        if width:
            self._taken.append((start, start + width))
            self._taken.sort()
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Give back the region that `take(nbytes)` has returned."""
        if nbytes:
            self._taken.remove((start, start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT))

    @property
    def end(self) -> int:
        """The first position from which on all is free."""
        return self._taken[-1][1] if self._taken else 0


def new_segment(limit: int) -> Segment | None:
    """Returns memory to show to other ranks, or None on a platform that has no such memory."""
    try:
        return Segment.new(limit)
    except (AttributeError, OSError):
        return None
