"""The memory that a caching allocator reserves for a step: more than the bytes that are alive at once.

On a device with streams, a block that was allocated on one stream serves that stream alone until the allocator gives it
back. So each lane has a pool of its own, and what is reserved is the sum of the pools' peaks, which are at different
moments. Within a pool, holes between blocks of different sizes are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sherd.schedule.moments import MemoryKind
from sherd.simulate.timeline import Change, Lane

SEGMENT = 2 << 20
"""torch's allocator takes memory from the driver in multiples of this many bytes."""

POOLS = {
    MemoryKind.ROWS.value: Lane.GATHER,
    MemoryKind.UNSHARDED.value: Lane.GATHER,
    MemoryKind.GRADIENT_ROWS.value: Lane.REDUCE,
    MemoryKind.REDUCED.value: Lane.REDUCE,
    MemoryKind.TRANSPORT.value: Lane.REDUCE,
}
"""The lane that allocates a kind of memory, where that is not compute."""


def reserved_bytes(changes: Iterable[Change], has_pools: bool) -> int:
    """Returns the bytes that are reserved in a step with these changes; `has_pools`: lanes have pools of their own."""
    now: Counter[Lane] = Counter()
    most: Counter[Lane] = Counter()
    for change in changes:
        pool = POOLS.get(change.kind, Lane.COMPUTE) if has_pools else Lane.COMPUTE
        now[pool] += change.nbytes
        most[pool] = max(most[pool], now[pool])
    return sum(-(-nbytes // SEGMENT) * SEGMENT for nbytes in most.values())
