"""Extents: consecutive elements of a line, and how a line is cut into them. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Extent:
    start: int
    numel: int

    def __post_init__(self) -> None:
        assert self.start >= 0 and self.numel >= 0, f"an extent cannot be negative: {self}"

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def shifted(self, by: int) -> Extent:
        """Returns an extent as long as this one, `by` elements further on."""
        return Extent(self.start + by, self.numel)

    def intersect(self, other: Extent) -> Extent:
        """Returns the elements in both extents: an empty extent inside `self` if they share none."""
        start = min(max(self.start, other.start), self.stop)
        stop = max(start, min(self.stop, other.stop))
        return Extent(start, stop - start)


@lru_cache(maxsize=1024)
def chunks(size: int, parts: int) -> tuple[Extent, ...]:
    """Cut `size` elements into `parts` extents as `torch.chunk` does: equal ones, then a shorter one, then empty ones.

    >>> [e.numel for e in chunks(7, 4)]
    [2, 2, 2, 1]
    >>> [e.numel for e in chunks(5, 4)]
    [2, 2, 1, 0]
    """
    step = -(-size // parts)
    starts = [min(part * step, size) for part in range(parts)]
    return tuple(Extent(start, min(step, size - start)) for start in starts)


def aligned(numel: int, to: int) -> int:
    """Returns the least multiple of `to` that is at least `numel`."""
    return -(-numel // to) * to
