"""The memory that a device reserves for a step: more than the bytes that are alive at once.

On a device with streams, a block that was allocated on one stream serves that stream alone until the allocator gives it
back. So each lane has a pool of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from sherd.schedule.moments import MemoryKind
from sherd.tools.simulate.allocator import Block, CachingAllocator
from sherd.tools.simulate.sharded import Unit
from sherd.tools.simulate.timeline import Change, Lane

SEGMENT = 2 << 20
"""torch's allocator takes memory from the driver in multiples of this many bytes."""


def lane_of(kind: str, unit: Unit | None) -> Lane:
    """Returns the lane that allocates a kind of memory of `unit`; for what is no buffer of the engine it is compute."""
    groups = unit.groups if unit is not None else ()
    match kind:
        case MemoryKind.ROWS.value | MemoryKind.SENT.value:
            return Lane.GATHER
        case MemoryKind.UNSHARDED.value if not any(each.rows for each in groups):  # else compute copies it out of rows
            return Lane.GATHER
        case MemoryKind.GRADIENT_ROWS.value if any(each.lane_owns_rows for each in groups):
            return Lane.REDUCE
        case MemoryKind.REDUCED.value | MemoryKind.TRANSPORT.value:
            return Lane.REDUCE
        case MemoryKind.GRADIENTS.value if all(each.reduced == each.gradients for each in groups):  # the sum itself
            return Lane.REDUCE
        case _:
            return Lane.COMPUTE


def reserved_roughly(changes: Iterable[Change], units: tuple[Unit, ...]) -> int:
    """Returns the bytes that are reserved in a step with these changes, as if there were no holes between blocks of
    different sizes: the sum of the lanes' peaks, which are at different moments."""
    now: Counter[Lane] = Counter()
    most: Counter[Lane] = Counter()
    lanes = _Lanes(units)
    for change in changes:
        lane = lanes[change.kind, change.unit]
        now[lane] += change.nbytes
        most[lane] = max(most[lane], now[lane])
    return sum(-(-nbytes // SEGMENT) * SEGMENT for nbytes in most.values())


class _Lanes(dict[tuple[str, int], Lane]):
    """The lanes by the kind of memory and the number of the unit, -1 for none."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self._units = units

    def __missing__(self, key: tuple[str, int]) -> Lane:
        kind, unit = key
        self[key] = lane_of(kind, self._units[unit] if unit >= 0 else None)
        return self[key]


class Reserved:
    """What the caching allocator reserves in a step, as each of its tensors comes and goes."""

    def __init__(self, units: tuple[Unit, ...], limit: int | None = None) -> None:
        self.allocator = CachingAllocator(limit)
        self._lanes = _Lanes(units)
        self._held: defaultdict[tuple[str, int], list[tuple[int, Block]]] = defaultdict(list)
        self._tensors: defaultdict[int, deque[Block]] = defaultdict(deque)

    def change(self, kind: str, unit: int, nbytes: int) -> None:
        """Take a buffer of `nbytes`, or give back as many bytes of that kind if it is below 0: one buffer of that size,
        or the oldest ones."""
        held = self._held[kind, unit]
        if nbytes > 0:
            held.append((nbytes, self.allocator.allocate(nbytes, self._lanes[kind, unit])))
        while nbytes < 0:
            at = next((at for at, (size, _) in enumerate(held) if size == -nbytes), 0)
            size, block = held.pop(at)
            self.allocator.free(block)
            nbytes += size
            if nbytes > 0:  # a part of it stays
                self.change(kind, unit, nbytes)

    def follow(self, tensors: Iterable[tuple[int, int]]) -> None:
        """Follow the tensors of a stretch. Of one that is there in several micro-batches the oldest goes first."""
        for tensor, nbytes in tensors:
            if nbytes:
                self._tensors[tensor].append(self.allocator.allocate(nbytes, Lane.COMPUTE))
            else:
                self.allocator.free(self._tensors[tensor].popleft())
