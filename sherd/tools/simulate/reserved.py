"""The memory that a device reserves for a step: more than the bytes that are alive at once.

On a device with streams, a block that is allocated on one stream serves that stream alone until the allocator gives the
block back. So each lane has a pool of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from sherd.schedule.moments import MemoryKind
from sherd.tools.simulate.sharded import SimulatedUnit
from sherd.tools.simulate.timeline import Change, Lane, most_of

SEGMENT = 2 << 20
"""torch's allocator takes memory from the driver in multiples of this many bytes."""


def lane_of(kind: str, unit: SimulatedUnit | None) -> Lane:
    """Returns the lane that allocates a kind of memory of `unit`; memory outside of the engine is compute's."""
    groups = unit.groups if unit is not None else ()
    match kind:
        case MemoryKind.ROWS.value | MemoryKind.SENT.value:
            return Lane.GATHER
        case MemoryKind.UNSHARDED.value if not any(each.rows for each in groups):  # else compute copies out of rows
            return Lane.GATHER
        case MemoryKind.GRADIENT_ROWS.value if any(each.lane_owns_rows for each in groups):
            return Lane.REDUCE
        case MemoryKind.IN_FLIGHT.value:
            return Lane.COPY
        case MemoryKind.REDUCED.value | MemoryKind.TRANSPORT.value | MemoryKind.LOST.value:
            return Lane.REDUCE
        case MemoryKind.GRADIENTS.value if all(each.reduced == each.gradients for each in groups):  # these are the sums
            return Lane.REDUCE
        case _:
            return Lane.COMPUTE


def reserved_roughly(changes: Iterable[Change], units: tuple[SimulatedUnit, ...]) -> int:
    """Returns the bytes that a step reserves without holes between blocks: the sum of the peaks of all lanes."""
    lane_at = _lanes(units)
    most = most_of(changes, lambda change: lane_at(change.kind, change.unit))
    return sum(-(-nbytes // SEGMENT) * SEGMENT for nbytes in most.values())


def _lanes(units: tuple[SimulatedUnit, ...]) -> Callable[[str, int], Lane]:
    """Returns `lane_of` by the number of the unit, -1 for memory of no unit."""
    return cache(lambda kind, unit: lane_of(kind, units[unit] if unit >= 0 else None))


class Reserved:
    """The caching allocator in a step, as tensors come and go."""

    def __init__(self, units: tuple[SimulatedUnit, ...], limit: int | None = None) -> None:
        self.allocator = CachingAllocator(limit)
        self._lane_at = _lanes(units)
        self._buffers: defaultdict[tuple[str, int], list[tuple[int, MemoryBlock]]] = defaultdict(list)
        self._tensors: defaultdict[int, deque[MemoryBlock]] = defaultdict(deque)

    def change(self, kind: str, unit: int, nbytes: int) -> None:
        """Take a buffer of `nbytes`; below 0, give back a buffer of that size, or else the oldest buffers."""
        buffers = self._buffers[kind, unit]
        if nbytes > 0:
            buffers.append((nbytes, self.allocator.allocate(nbytes, self._lane_at(kind, unit))))
        while nbytes < 0:
            at = next((at for at, (size, _) in enumerate(buffers) if size == -nbytes), 0)
            size, block = buffers.pop(at)
            self.allocator.free(block)
            nbytes += size
            if nbytes > 0:  # a part of the buffer stays
                self.change(kind, unit, nbytes)

    def follow(self, tensors: Iterable[tuple[int, int]]) -> None:
        """Allocate and free the tensors of a stretch. If several micro-batches have a tensor, the oldest is freed."""
        for tensor, nbytes in tensors:
            if nbytes:
                self._tensors[tensor].append(self.allocator.allocate(nbytes, Lane.COMPUTE))
            else:
                self.allocator.free(self._tensors[tensor].popleft())


# The allocator

MIB = 1 << 20
SMALLEST = 512
MOST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUNDED_TO = 2 * MIB, 20 * MIB, 2 * MIB
LEAST_OF_ITS_OWN = 10 * MIB


class MemoryBlock(NamedTuple):
    """A part of a segment. Blocks are ordered by size, then by address."""

    size: int
    address: int
    lane: Lane
    is_small: bool

    @property
    def end(self) -> int:
        return self.address + self.size


class CachingAllocator:
    """A simulation of the caching allocator that torch has for accelerators, with the memory it takes from the driver.

    It takes segments, and cuts them into blocks:

        request            pool     segment
        up to 1 MiB        small    2 MiB
        below 10 MiB       large    20 MiB
        else               large    the request, in multiples of 2 MiB

    A request gets the smallest free block of its lane and pool that is large enough. The rest of the block is cut off
    if it has 512 bytes at least, in the large pool more than 1 MiB; else it is lost until the block is free. A freed
    block is joined with its free neighbors. Blocks of other lanes are never taken, since their streams may still
    use them. So free memory may be of no use, and more is reserved than is alive. When the driver has no more memory,
    segments that are entirely free are given back first.

    Rules and sizes are those of torch (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h) with its
    defaults, without expandable segments.

    Attributes:
        limit: the bytes of the driver; None: unlimited.
        reserved: the bytes that are taken from the driver now.
        most_reserved: the most bytes that were taken at once.
        num_retries: the number of times that segments were given back because the driver had no more memory.
        has_failed: True if the driver had too little memory even then. The simulation goes on with more.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.num_retries = 0
        self.has_failed = False
        self._top = 0
        self._segments: dict[int, int] = {}
        """Sizes by address. There is a gap between two segments, so that blocks of both are never joined."""
        self._used: set[int] = set()
        """The addresses of allocated blocks."""
        self._free: dict[tuple[Lane, bool], list[MemoryBlock]] = {}
        self._beginning: dict[int, MemoryBlock] = {}
        self._ending: dict[int, MemoryBlock] = {}

    def allocate(self, nbytes: int, lane: Lane) -> MemoryBlock:
        """Returns a block of at least `nbytes`; `nbytes` is above 0."""
        size = -(-nbytes // SMALLEST) * SMALLEST
        is_small = size <= MOST_SMALL
        free = self._free.setdefault((lane, is_small), [])
        at = bisect_left(free, MemoryBlock(size, 0, lane, is_small))
        if at < len(free):
            block = free[at]
            self._take_out(block)
        else:
            block = self._segment(size, lane, is_small)
        rest = block.size - size
        if rest >= SMALLEST if is_small else rest > MOST_SMALL:
            block = MemoryBlock(size, block.address, lane, is_small)
            self._put_in(MemoryBlock(rest, block.end, lane, is_small))
        self._used.add(block.address)
        return block

    def free(self, block: MemoryBlock) -> None:
        assert block.address in self._used, "only allocated blocks are freed"
        self._used.remove(block.address)
        size, address = block.size, block.address
        for neighbour in (self._ending.get(address), self._beginning.get(block.end)):
            if neighbour is not None:
                self._take_out(neighbour)
                size, address = size + neighbour.size, min(address, neighbour.address)
        self._put_in(MemoryBlock(size, address, block.lane, block.is_small))

    def _segment(self, size: int, lane: Lane, is_small: bool) -> MemoryBlock:
        if is_small:
            size = SMALL_SEGMENT
        elif size < LEAST_OF_ITS_OWN:
            size = LARGE_SEGMENT
        else:
            size = -(-size // ROUNDED_TO) * ROUNDED_TO
        if self.limit is not None and self.reserved + size > self.limit:
            self.num_retries += 1
            for block in [*self._beginning.values()]:
                if self._segments.get(block.address) == block.size:
                    self._take_out(block)
                    self.reserved -= self._segments.pop(block.address)
            self.has_failed = self.has_failed or self.reserved + size > self.limit
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        block = MemoryBlock(size, self._top, lane, is_small)
        self._segments[block.address] = size
        self._top = block.end + SMALLEST
        return block

    def _put_in(self, block: MemoryBlock) -> None:
        insort(self._free[block.lane, block.is_small], block)
        self._beginning[block.address] = self._ending[block.end] = block

    def _take_out(self, block: MemoryBlock) -> None:
        free = self._free[block.lane, block.is_small]
        del free[bisect_left(free, block)], self._beginning[block.address], self._ending[block.end]
