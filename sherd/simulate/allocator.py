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
from dataclasses import dataclass

from sherd.simulate.timeline import Lane

MIB = 1 << 20
SMALLEST = 512
MOST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUNDED_TO = 2 * MIB, 20 * MIB, 2 * MIB
LEAST_OF_ITS_OWN = 10 * MIB


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, between two others or None at its ends."""

    lane: Lane
    is_small: bool
    address: int
    size: int
    before: Block | None = None
    behind: Block | None = None
    is_free: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.behind is None


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
        self._free: dict[tuple[Lane, bool], list[tuple[int, int, Block]]] = {}

    def allocate(self, nbytes: int, lane: Lane) -> Block:
        """Returns a block of at least `nbytes`, which are above 0."""
        size = -(-nbytes // SMALLEST) * SMALLEST
        is_small = size <= MOST_SMALL
        free = self._free.setdefault((lane, is_small), [])
        at = bisect_left(free, (size,))
        block = free.pop(at)[-1] if at < len(free) else self._segment(size, lane, is_small)
        block.is_free = False
        rest = block.size - size
        if rest >= SMALLEST if is_small else rest > MOST_SMALL:
            block.size = size
            behind = Block(lane, is_small, block.address + size, rest, block, block.behind, True)
            if block.behind is not None:
                block.behind.before = behind
            block.behind = behind
            insort(free, (rest, behind.address, behind))
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        assert not block.is_free, "it was given out"
        free = self._free[block.lane, block.is_small]
        before, behind = block.before, block.behind
        if before is not None and before.is_free:
            self._take_out(before)
            before.size += block.size
            before.behind = behind
            if behind is not None:
                behind.before = before
            block = before
        if behind is not None and behind.is_free:
            self._take_out(behind)
            block.size += behind.size
            block.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = block
        block.is_free = True
        insort(free, (block.size, block.address, block))

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
        self._top += size
        return Block(lane, is_small, self._top - size, size)

    def _give_back(self) -> None:
        for blocks in self._free.values():
            self.reserved -= sum(size for size, _, block in blocks if block.is_whole)
            blocks[:] = [each for each in blocks if not each[-1].is_whole]

    def _take_out(self, block: Block) -> None:
        free = self._free[block.lane, block.is_small]
        del free[bisect_left(free, (block.size, block.address))]
