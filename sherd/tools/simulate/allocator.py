"""The caching allocator that torch has for accelerators, played: the memory that it takes from the driver.

It takes segments, and cuts them into blocks:

    request            pool     segment
    up to 1 MiB        small    2 MiB
    below 10 MiB       large    20 MiB
    else               large    the request, in multiples of 2 MiB

A request gets the smallest free block of its lane and pool that is large enough. What is over is cut off, if it is
512 bytes at least, in the large pool more than 1 MiB; else it is lost until the block is free. A block that is freed is
joined with the free ones beside it. Blocks of other lanes are never taken, for their streams may still use them. So
memory that is free may be of no use, and more is reserved than is alive. Where the driver has no more, segments that
are wholly free are given back first.

Rules and sizes are those of torch (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h) with its defaults,
without expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from sherd.tools.simulate.timeline import Lane

MIB = 1 << 20
SMALLEST = 512
MOST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUNDED_TO = 2 * MIB, 20 * MIB, 2 * MIB
LEAST_OF_ITS_OWN = 10 * MIB


class Block(NamedTuple):
    """A part of a segment. The smaller ones come first, of these the ones at lower addresses."""

    size: int
    address: int
    lane: Lane
    is_small: bool

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size


class CachingAllocator:
    """Gives out blocks.

    Attributes:
        limit: bytes that the driver has; None for any number.
        reserved: bytes that are taken from the driver now.
        most_reserved: the most that were.
        num_retries: times that segments were given back because the driver had no more.
        has_failed: the driver had too little even so. It is taken for larger then.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.num_retries = 0
        self.has_failed = False
        self._top = 0
        self._segments: dict[int, int] = {}
        """Their sizes by their addresses, which leave a gap between two segments."""
        self._given: set[int] = set()
        """The addresses of blocks that are given out."""
        self._free: dict[tuple[Lane, bool], list[Block]] = {}
        self._beginning: dict[int, Block] = {}
        self._ending: dict[int, Block] = {}

    def allocate(self, nbytes: int, lane: Lane) -> Block:
        """Returns a block of at least `nbytes`, which are above 0."""
        size = -(-nbytes // SMALLEST) * SMALLEST
        is_small = size <= MOST_SMALL
        free = self._free.setdefault((lane, is_small), [])
        at = bisect_left(free, Block(size, 0, lane, is_small))
        if at < len(free):
            block = free[at]
            self._take_out(block)
        else:
            block = self._segment(size, lane, is_small)
        rest = block.size - size
        if rest >= SMALLEST if is_small else rest > MOST_SMALL:
            block = Block(size, block.address, lane, is_small)
            self._put_in(Block(rest, block.end, lane, is_small))
        self._given.add(block.address)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        assert block.address in self._given, "it was given out"
        self._given.remove(block.address)
        size, address = block.size, block.address
        for each in (self._ending.get(address), self._beginning.get(block.end)):
            if each is not None:
                self._take_out(each)
                size, address = size + each.size, min(address, each.address)
        self._put_in(Block(size, address, block.lane, block.is_small))

    def _segment(self, size: int, lane: Lane, is_small: bool) -> Block:
        if is_small:
            size = SMALL_SEGMENT
        elif size < LEAST_OF_ITS_OWN:
            size = LARGE_SEGMENT
        else:
            size = -(-size // ROUNDED_TO) * ROUNDED_TO
        if self.limit is not None and self.reserved + size > self.limit:
            self.num_retries += 1
            self._give_back()
            self.has_failed = self.has_failed or self.reserved + size > self.limit
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        block = Block(size, self._top, lane, is_small)
        self._segments[block.address] = size
        self._top = block.end + SMALLEST
        return block

    def _give_back(self) -> None:
        for block in [*self._beginning.values()]:
            if self._segments.get(block.address) == block.size:
                self._take_out(block)
                self.reserved -= self._segments.pop(block.address)

    def _put_in(self, block: Block) -> None:
        insort(self._free[block.lane, block.is_small], block)
        self._beginning[block.address] = self._ending[block.end] = block

    def _take_out(self, block: Block) -> None:
        free = self._free[block.lane, block.is_small]
        del free[bisect_left(free, block)], self._beginning[block.address], self._ending[block.end]
