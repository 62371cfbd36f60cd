"""The placement of a flat parameter on a tensor-parallel axis, where every rank has a vector of its own.

axis rank 0  | up, rows 0 to 2 | norm |          the flat parameter is 1-D: the vectors one after the other;
axis rank 1  | up, rows 3 to 4 | norm |          the elements of norm are the same in both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch.distributed.tensor import Shard

from sherd.layout.extent import Extent

Made = TypeVar("Made", bound="UnevenShard")


class UnevenShard(Shard):
    """A placement that torch takes for `Shard(0)` wherever it only looks."""

    stands_for = Shard(0)

    def __new__(cls: type[Made], *args: object, **kwargs: object) -> Made:
        """Returns a placement whose C++ part is that of `Shard(0)`."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # the C++ base has no annotations

    def __str__(self) -> str:
        return repr(self)

    def __copy__(self: Made) -> Made:
        return self

    def __deepcopy__(self: Made, memo: dict[int, object]) -> Made:
        return self


class VectorShard(UnevenShard):
    """Rank `r` of the axis has `sizes[r]` elements: a vector that `RaggedShard` on other axes cuts into runs.

    `copies`: the extents of this rank's vector whose elements all ranks of the axis have. Reductions count them on the
    axis' first rank alone; so the norm is that of the parameters, not of the vectors.
    """

    sizes: tuple[int, ...]
    copies: tuple[Extent, ...]

    def __init__(self, sizes: tuple[int, ...], copies: tuple[Extent, ...]) -> None:
        super().__init__(0)
        self.sizes = sizes
        self.copies = copies

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The elements that each rank of the axis has, counted within the part that the other axes leave."""
        starts = accumulate(self.sizes, initial=0)
        return tuple(Extent(start, size) for start, size in zip(starts, self.sizes, strict=False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorShard) and (self.sizes, self.copies) == (other.sizes, other.copies)

    def __hash__(self) -> int:
        return hash((self.sizes, self.copies))

    def __repr__(self) -> str:
        return f"VectorShard(elements={list(self.sizes)})"

    def __reduce__(self) -> tuple[type[VectorShard], tuple[tuple[int, ...], tuple[Extent, ...]]]:
        return VectorShard, (self.sizes, self.copies)


def counted(vectors: Mapping[int, VectorShard], run: Extent, coordinate: Sequence[int]) -> tuple[Extent, ...] | None:
    """Returns the extents of `run`, this rank's part of the vector, that this rank counts in reductions. None: all.

    They leave out elements that the first rank of an axis has too, and are counted from the start of the run.
    """
    copies = [run.intersect(copy) for axis, vector in vectors.items() if coordinate[axis] for copy in vector.copies]
    if not any(copy.numel for copy in copies):
        return None
    extents, start = [], run.start
    for copy in sorted(copies, key=lambda copy: copy.start):
        extents.append(Extent(start, max(0, copy.start - start)))
        start = max(start, copy.stop)
    extents.append(Extent(start, run.stop - start))
    return tuple(extent.shifted(-run.start) for extent in extents if extent.numel)
