"""Boxes: rectangular parts of a tensor, and how a tensor is cut into them for the files of a checkpoint. Integers only.

A tensor that is sharded as torch shards it needs no list of its pieces: a `Grid` of a few numbers says where each lies,
however many there are. Any other tensor has a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Shape


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The part of a tensor that begins at index `offsets` and has `sizes`."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Returns the elements in both boxes, or None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - start
            for a, m, b, n, start in zip(self.offsets, self.sizes, other.offsets, other.sizes, starts, strict=True)
        )
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor that holds `outer` alone."""
        places = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(start - first, start - first + size) for start, first, size in places)

    def narrowed(self, dim: int, extent: Extent) -> Box:
        """Returns the indices `extent` of `dim`, counted from the box's first."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += extent.start
        sizes[dim] = extent.numel
        return Box(tuple(offsets), tuple(sizes))


def whole(shape: Shape) -> Box:
    """Returns all of a tensor of `shape`."""
    return Box((0,) * len(shape), shape)


Piece = tuple[int, Box]
"""The number of a file, and the part of a tensor that it holds."""


@dataclass(frozen=True, slots=True)
class GridCut:
    """Each box is cut along `dim` into `parts`, as `torch.chunk` does; the next part is `stride` files further on."""

    dim: int
    parts: int
    stride: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor that is cut by `cuts`, one after the other; its first piece is in file number `file`.

    file 4, cuts dim 0 into 2 with stride 2, dim 1 into 2 with stride 1        | 4 | 5 |
                                                                               | 6 | 7 |
    """

    file: int
    cuts: tuple[GridCut, ...] = ()

    def pieces(self, shape: Shape, part: Box | None = None) -> Iterator[Piece]:
        """Yields the pieces that share elements with `part` (None: all), in order. A tensor without elements has one
        piece, its first."""
        everything = whole(shape)
        if not everything.numel:
            yield self.file, everything
        else:
            yield from _cut(self.file, everything, self.cuts, part or everything)


def _cut(file: int, box: Box, cuts: tuple[GridCut, ...], part: Box) -> Iterator[Piece]:
    if not cuts:
        yield file, box
        return
    cut, *others = cuts
    size, start = box.sizes[cut.dim], box.offsets[cut.dim]
    step = -(-size // cut.parts)
    first = max(part.offsets[cut.dim] - start, 0) // step
    stop = min(part.offsets[cut.dim] + part.sizes[cut.dim] - start, size)
    for number in range(first, -(-stop // step)):
        extent = Extent(number * step, min(step, size - number * step))
        yield from _cut(file + number * cut.stride, box.narrowed(cut.dim, extent), tuple(others), part)


def cell(box: Box, cuts: Iterable[tuple[int, int, int]]) -> Box:
    """Returns one part of `box`: for each (dim, parts, number) of `cuts`, part `number` of what `torch.chunk` makes
    along `dim`. It may be empty."""
    for dim, parts, number in cuts:
        box = box.narrowed(dim, chunks(box.sizes[dim], parts)[number])
    return box


def overlapping(boxes: Iterable[Box], most_steps: int | None = None) -> tuple[Box, Box] | None:
    """Returns two of `boxes` that share elements, or None. Boxes of one tensor; it takes n log n steps for n boxes that
    lie behind each other along one dim.

    Raises:
        OverflowError: it takes more than `most_steps` (None: as many as it takes).
    """
    listed = [box for box in boxes if box.numel]
    dims = range(len(listed[0].sizes)) if listed else range(0)
    dim = max(dims, key=lambda each: len({box.offsets[each] for box in listed}), default=None)
    if dim is None:
        return (listed[0], listed[1]) if len(listed) > 1 else None  # scalars
    active: list[Box] = []
    steps = 0
    for box in sorted(listed, key=lambda each: each.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        steps += len(active)
        if most_steps is not None and steps > most_steps:
            raise OverflowError
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


@lru_cache(maxsize=4096)
def boxes_of_run(shape: Shape, run: Extent) -> tuple[Box, ...]:
    """Returns the boxes that make up `run` of the flattened tensor, in order; each of them is one run, too.

    A run is a few elements that end a row, whole rows, and a few elements that begin a row. In more dimensions each of
    those elements is a row that is cut the same way: at most 2 * ndim - 1 boxes.

        shape (4, 5), elements 3 to 17

            . . . a a        a: row 0, columns 3 to 5
            b b b b b        b: rows 1 and 2, all columns
            b b b b b
            c c . . .        c: row 3, columns 0 to 2
    """
    if not run.numel:
        return ()
    if not shape:
        return (Box((), ()),)
    inner = prod(shape[1:])
    found: list[Box] = []
    start = run.start
    while start < run.stop:
        row, behind = divmod(start, inner)
        num_rows = (run.stop - start) // inner
        if not behind and num_rows:
            found.append(Box((row,) + (0,) * (len(shape) - 1), (num_rows, *shape[1:])))
            start += num_rows * inner
        else:
            numel = min(run.stop - start, inner - behind)
            found += [
                Box((row, *part.offsets), (1, *part.sizes)) for part in boxes_of_run(shape[1:], Extent(behind, numel))
            ]
            start += numel
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Span:
    """`box`, which lies in one run of its piece from element `start` on, and `wanted`, what is asked for of it."""

    start: int
    box: Box
    wanted: Box


def spans(piece: Box, part: Box, most: int, start: int = 0) -> Iterator[Span]:
    """Yields the spans of `piece` that hold `part`, which lies within it, each of at most `most` elements, in order.

    A span takes rows as a whole, also where a part of each is wanted, unless a row has more than `most` elements.
    """
    if not piece.sizes or (piece.numel <= most and part == piece):
        yield Span(start, piece, part)
        return
    inner = prod(piece.sizes[1:])
    first = part.offsets[0] - piece.offsets[0]
    step = max(most // inner, 1)
    for row in range(first, first + part.sizes[0], step):
        rows = Extent(row, min(step, first + part.sizes[0] - row))
        box = piece.narrowed(0, rows)
        wanted = part.narrowed(0, Extent(row - first, rows.numel))
        if inner <= most:
            yield Span(start + row * inner, box, wanted)
            continue
        below = spans(Box(box.offsets[1:], box.sizes[1:]), Box(wanted.offsets[1:], wanted.sizes[1:]), most)
        index = box.offsets[:1]
        for each in below:
            yield Span(
                start + row * inner + each.start,
                Box(index + each.box.offsets, (1, *each.box.sizes)),
                Box(index + each.wanted.offsets, (1, *each.wanted.sizes)),
            )
