"""Memory that the ranks of one host read from one another. It has no name, and its lowest free bytes are used first.

A segment is an anonymous file in memory (`memfd`): it is in no folder, is not bound by the size of /dev/shm, and goes
when no process has it open or mapped any more, however these end. Pages that were never written take no memory.
"""

from __future__ import annotations

import mmap
import os

import torch

_ALIGNMENT = 128  # two cache lines, which processors fetch together


class Segment:
    """Shared memory, by its file descriptor; every process with a descriptor maps it for itself."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._remap()

    @classmethod
    def new(cls, nbytes: int) -> Segment:
        """Returns a segment of `nbytes` addresses, without memory so far. Raises OSError if the system has none."""
        fd = os.memfd_create("sherd", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns bytes `start` to `start + nbytes` as a 1-D tensor."""
        if start + nbytes > self._bytes.numel():  # the owner has grown the segment
            self._remap()
        return self._bytes[start : start + nbytes].view(dtype)

    def reach(self, nbytes: int) -> None:
        """Have at least `nbytes` addresses."""
        if nbytes > self._bytes.numel():  # views of the earlier mapping stay valid: the pages are the same
            os.ftruncate(self.fd, nbytes)
            self._remap()

    def give_back(self, start: int) -> None:
        """Give back the memory at `start` and above; the addresses stay, and read as zeros."""
        first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if first_page < len(self._map):
            self._map.madvise(mmap.MADV_REMOVE, first_page)

    @property
    def nbytes(self) -> int:
        """The bytes of the segment's memory, a multiple of the page size."""
        # `st_size` would count addresses that were never written, too. A block has 512 bytes, whatever a page has.
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last tensor that looks into it."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _remap(self) -> None:
        # The earlier mapping is not closed, because tensors may look into it. It goes with the last of them.
        self._map = mmap.mmap(self.fd, 0)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class Regions:
    """The taken bytes of an endless line. New regions are placed as low as they fit, where memory is warm.

    | taken | free | taken | free ...      take(2) -> the first gap that is wide enough
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # start, end; by start

    def fit(self, nbytes: int) -> int:
        """Returns where a region of `nbytes` would begin."""
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
        """Free the region that `take(nbytes)` returned."""
        if nbytes:
            self._taken.remove((start, start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT))

    @property
    def end(self) -> int:
        """The position from which on everything is free."""
        return self._taken[-1][1] if self._taken else 0


def new_segment(limit: int) -> Segment | None:
    """Returns memory to show to other ranks; None on a platform without it."""
    try:
        return Segment.new(limit)
    except (AttributeError, OSError):
        return None
