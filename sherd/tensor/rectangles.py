"""Which rectangles make up a run of a tensor's elements? Integers only.

A run of the flattened tensor is a few elements that end a row, whole rows, and a few that begin one; in more
dimensions each of those elements is a row that is cut the same way: at most 2 * ndim - 1 rectangles.

    shape (4, 5), elements 3 to 17

        . . . a a        a: row 0, columns 3 to 5
        b b b b b        b: rows 1 and 2, all columns
        b b b b b
        c c . . .        c: row 3, columns 0 to 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sherd.layout.extent import Extent
from sherd.layout.placement import Shape


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor that has a first index and a size in each dim, and is one run of `numel` elements from
    `start` on."""

    start: int
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Elements of it."""
        return prod(self.sizes)


@lru_cache(maxsize=4096)
def rectangles(shape: Shape, run: Extent) -> tuple[Rectangle, ...]:
    """The rectangles that `run` of the flattened tensor is made of, in order."""
    if not run.numel:
        return ()
    if not shape:
        return (Rectangle(run.start, (), ()),)
    inner = prod(shape[1:])
    found: list[Rectangle] = []
    start = run.start
    while start < run.stop:
        row = start // inner
        if start == row * inner and run.stop - start >= inner:
            rows = (run.stop - start) // inner
            found.append(Rectangle(start, (row,) + (0,) * (len(shape) - 1), (rows, *shape[1:])))
            start += rows * inner
        else:
            stop = min(run.stop, (row + 1) * inner)
            found += _in_row(shape, row, Extent(start - row * inner, stop - start))
            start = stop
    return tuple(found)


def _in_row(shape: Shape, row: int, run: Extent) -> list[Rectangle]:
    """The rectangles of a run inside one row."""
    before = row * prod(shape[1:])
    return [
        Rectangle(before + each.start, (row, *each.offsets), (1, *each.sizes)) for each in rectangles(shape[1:], run)
    ]
