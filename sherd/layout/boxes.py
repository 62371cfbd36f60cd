"""Boxes: rectangular parts of a tensor, and how a tensor is cut into them for the files of a checkpoint. Integers only.

A tensor that torch shards needs no list of its parts: a `Grid` of a few numbers says where each part is. Any other
tensor has a list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Shape


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The part of a tensor from index `offsets` on, of shape `sizes`."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - start
            for a, m, b, n, start in zip(self.offsets, self.sizes, other.offsets, other.sizes, starts, strict=True)
        )
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def meets(self, other: Box) -> bool:
        """Returns True if the boxes, of which neither is empty, share elements."""
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            if a >= b + n or b >= a + m:
                return False
        return True

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor of the elements of `outer`."""
        places = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(start - first, start - first + size) for start, first, size in places)

    def narrowed(self, dim: int, extent: Extent) -> Box:
        """Returns the part of the box with the indices `extent` of `dim`, counted from the start of the box."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += extent.start
        sizes[dim] = extent.numel
        return Box(tuple(offsets), tuple(sizes))


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


Piece = tuple[int, Box]
"""The number of a file, and the part of a tensor in the file."""


@dataclass(frozen=True, slots=True)
class GridCut:
    """A cut of each box along `dim` into `parts`, as `torch.chunk` cuts; the next part is `stride` files further on."""

    dim: int
    parts: int
    stride: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor that is cut by `cuts`, one after the other, with its first part in file number `file`.

    file 4, cuts dim 0 into 2 with stride 2, dim 1 into 2 with stride 1        | 4 | 5 |
                                                                               | 6 | 7 |
    """

    file: int
    cuts: tuple[GridCut, ...] = ()

    def pieces(self, shape: Shape, part: Box | None = None) -> Iterator[Piece]:
        """Yields the numbers of files, each with a box, that share elements with `part` (None: all), in order."""
        everything = whole(shape)
        if not everything.numel:  # such a tensor has one part, the first
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
    """Returns one part of `box`, maybe empty: for each of `cuts`, chunk `number` of `parts` chunks along `dim`."""
    for dim, parts, number in cuts:
        box = box.narrowed(dim, chunks(box.sizes[dim], parts)[number])
    return box


def overlapping(boxes: Iterable[Box], most_per_box: int | None = None) -> tuple[Box, Box] | None:
    """Returns two of `boxes`, parts of one tensor, that share elements. None: no two do.

    It takes n log n steps for n boxes that follow one another along one dim.

    Raises:
        OverflowError: each box has to be compared with more than `most_per_box` others, on average (None: no limit).
    """
    listed = [box for box in boxes if box.numel]
    if len(listed) < 2:
        return None
    dims = range(len(listed[0].sizes))
    num_pairs, dim = min(((_side_by_side(listed, dim), dim) for dim in dims), default=(0, None))
    if dim is None:
        return listed[0], listed[1]  # scalars
    if most_per_box is not None and num_pairs > most_per_box * len(listed):
        raise OverflowError
    active: list[Box] = []
    for box in sorted(listed, key=lambda each: each.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in active:
            if box.meets(other):
                return other, box
        active.append(box)
    return None


def _side_by_side(boxes: Sequence[Box], dim: int) -> int:
    """Returns the number of pairs of `boxes` that share an index of `dim`."""
    starts = sorted(box.offsets[dim] for box in boxes)
    ends = sorted(box.offsets[dim] + box.sizes[dim] for box in boxes)
    return sum(number - bisect_right(ends, start) for number, start in enumerate(starts))


@lru_cache(maxsize=4096)
def boxes_of_run(shape: Shape, run: Extent) -> tuple[Box, ...]:
    """Returns the boxes that make up `run` of the flattened tensor, in order; each box is one run, too.

    A run is a few elements at the end of a row, complete rows, and a few elements at the start of a row. In more
    dimensions these elements are rows, which are cut in the same way: at most 2 * ndim - 1 boxes.

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
    boxes: list[Box] = []
    start = run.start
    while start < run.stop:
        row, behind = divmod(start, inner)
        num_rows = (run.stop - start) // inner
        if not behind and num_rows:
            boxes.append(Box((row,) + (0,) * (len(shape) - 1), (num_rows, *shape[1:])))
            start += num_rows * inner
        else:
            numel = min(run.stop - start, inner - behind)
            boxes += [
                Box((row, *part.offsets), (1, *part.sizes)) for part in boxes_of_run(shape[1:], Extent(behind, numel))
            ]
            start += numel
    return tuple(boxes)


def start_of_run(piece: Box, part: Box) -> int | None:
    """Returns the first element of `part` within `piece`. None: `part` is not one run of `piece`."""
    # A run has all indices of each dim behind the first one of which it has more than one index.
    dims = range(len(part.sizes))
    cut = next((dim for dim in dims if part.sizes[dim] > 1), len(part.sizes))
    if any(part.sizes[dim] != piece.sizes[dim] for dim in dims[cut + 1 :]):
        return None
    start = 0
    for dim in dims:
        start = start * piece.sizes[dim] + part.offsets[dim] - piece.offsets[dim]
    return start


@dataclass(frozen=True, slots=True)
class BoxSpan:
    """A `box` that is one run of a file's box, from element `start` on, and the part of the box that is `wanted`."""

    start: int
    box: Box
    wanted: Box


def spans(piece: Box, part: Box, most: int, start: int = 0) -> Iterator[BoxSpan]:
    """Yields the spans that hold `part` of `piece`, each of at most `most` elements, in order.

    A span has complete rows, even if a part of each row is wanted, unless a row has more than `most` elements.
    """
    if not piece.sizes or (piece.numel <= most and part == piece):
        yield BoxSpan(start, piece, part)
        return
    inner = prod(piece.sizes[1:])
    first = part.offsets[0] - piece.offsets[0]
    step = max(most // inner, 1)
    for row in range(first, first + part.sizes[0], step):
        rows = Extent(row, min(step, first + part.sizes[0] - row))
        box = piece.narrowed(0, rows)
        wanted = part.narrowed(0, Extent(row - first, rows.numel))
        if inner <= most:
            yield BoxSpan(start + row * inner, box, wanted)
            continue
        below = spans(Box(box.offsets[1:], box.sizes[1:]), Box(wanted.offsets[1:], wanted.sizes[1:]), most)
        index = box.offsets[:1]
        for each in below:
            yield BoxSpan(
                start + row * inner + each.start,
                Box(index + each.box.offsets, (1, *each.box.sizes)),
                Box(index + each.wanted.offsets, (1, *each.wanted.sizes)),
            )
