"""The placement of a flat parameter on an axis beside data parallelism (tensor parallel), where every rank has a vector
of its own.

    axis rank 0  | up, rows 0 to 2 | norm |          a tensor of one dimension, the vectors one behind the other;
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
    """A placement that torch takes for `Shard(0)` wherever it only looks: its C++ part is that one's."""

    stands_for = Shard(0)

    def __new__(cls: type[Made], *args: object, **kwargs: object) -> Made:
        """The C++ base has no annotations."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __str__(self) -> str:
        return repr(self)

    def __copy__(self: Made) -> Made:
        return self

    def __deepcopy__(self: Made, memo: dict[int, object]) -> Made:
        return self


class VectorShard(UnevenShard):
    """Rank `r` of the axis has `sizes[r]` elements: a vector that `RaggedShard` on other axes cuts into runs.

    `copies`: the extents of this rank's vector whose elements all ranks of the axis have. Reductions count them once,
    at the axis' first rank; so the norm is that of the parameters, not of the vectors.
    """

    sizes: tuple[int, ...]
    copies: tuple[Extent, ...]

    def __init__(self, sizes: tuple[int, ...], copies: tuple[Extent, ...]) -> None:
        super().__init__(0)
        self.sizes = sizes
        self.copies = copies

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The elements that each rank of the axis has, counted in what other axes leave to it."""
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


def counted(vectors: Mapping[int, VectorShard], held: Extent, coordinate: Sequence[int]) -> tuple[Extent, ...] | None:
    """Returns the extents of a run that reductions count at this rank, from where the run begins, or None if they count
    all of it. The run is `held`, some elements of the vector; `vectors` are the placements by mesh axis. Elements that
    the first rank of an axis has too are left out."""
    copies = [held.intersect(copy) for axis, vector in vectors.items() if coordinate[axis] for copy in vector.copies]
    if not any(copy.numel for copy in copies):
        return None
    found, start = [], held.start
    for copy in sorted(copies, key=lambda copy: copy.start):
        found.append(Extent(start, max(0, copy.start - start)))
        start = max(start, copy.stop)
    found.append(Extent(start, held.stop - start))
    return tuple(extent.shifted(-held.start) for extent in found if extent.numel)
