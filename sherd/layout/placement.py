"""How one tensor is cut over one mesh axis: what does rank r hold of it? Integers only.

A placement is a rule (`Shard(dim)`, `Replicate()`); applied to a shape and a number of ranks it gives a `Cut`, the
numbers that everything else works with. A packing asks a cut only for its sizes, so a new placement is a new class
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

from sherd.errors import PlacementError
from sherd.layout.extent import Extent, chunks

Shape = tuple[int, ...]


class Placement(Protocol):
    """A rule that cuts a tensor over the ranks of one mesh axis."""

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """The numbers for one tensor, of which each rank's piece is cut once more into `parts`. `name` is for the error
        message. Raises `PlacementError`."""
        ...


@dataclass(frozen=True)
class Cut:
    """One tensor of `shape`, cut over `num_ranks` ranks along `dim`; `dim` is None when every rank holds all of it.

    Seen as `[outer, size, inner]` around `dim`, rank r holds `rows[r]` of the middle axis, for every outer index:

        shape (3, 5), dim 0, 2 ranks           shape (2, 5), dim 1, 2 ranks
        rank 0 | row 0 | row 1 |               rank 0 | r0: 0 1 2 | r1: 0 1 2 |
        rank 1 | row 2 |  pad  |               rank 1 | r0: 3 4 . | r1: 3 4 . |

    Every number is computed once: some take a look at all ranks, and there may be thousands.

    In the gathered buffer each rank's piece takes `slot` elements, the largest piece's size, its own elements first.
    """

    shape: Shape
    num_ranks: int
    dim: int | None
    rows: tuple[Extent, ...]

    @cached_property
    def outer(self) -> int:
        """Elements before `dim`."""
        return prod(self.shape[: self.dim]) if self.dim is not None else 1

    @cached_property
    def inner(self) -> int:
        """Elements after `dim`."""
        return prod(self.shape[self.dim + 1 :]) if self.dim is not None else prod(self.shape)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @cached_property
    def slot(self) -> int:
        """Elements that each rank's piece takes in a buffer, padding included."""
        return self.outer * max(extent.numel for extent in self.rows) * self.inner

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' padded pieces, one after the other, begin with the whole tensor in its own order."""
        if self.dim is None or self.outer != 1:
            return self.outer == 1
        size, most = self.shape[self.dim], max(extent.numel for extent in self.rows)
        return all(extent.start == min(rank * most, size) for rank, extent in enumerate(self.rows))

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements that the tensor takes in the unsharded buffer: padded pieces if they are in order, else its own."""
        return self.num_ranks * self.slot if self.in_order else self.numel

    @cached_property
    def num_rows_held(self) -> int:
        """Rows that all ranks hold together: `size` of the middle axis, or one for each copy."""
        return sum(extent.numel for extent in self.rows)

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether each rank's rows begin where the rank's before it end."""
        ends = (0, *(extent.stop for extent in self.rows))
        return all(extent.start == end for extent, end in zip(self.rows, ends, strict=False))

    def local_shape(self, rank: int) -> Shape:
        """The shape of what `rank` holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.rows[rank].numel, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Elements that `rank` holds."""
        return prod(self.local_shape(rank))


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut on tensor dimension `dim`, from the end if negative, as `torch.chunk` does: uneven and empty are fine."""

    dim: int = 0

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """The numbers for one tensor; raises `PlacementError` when it has no such dimension.

        Cut twice, 5 rows over 2 ranks in 2 parts each are 2, 1 and 1, 1.
        """
        dim = self.dim + len(shape) if self.dim < 0 else self.dim
        if not 0 <= dim < len(shape):
            raise PlacementError(
                f"{name}: Shard({self.dim}) asks for a dimension that a tensor of shape {shape} does not have; "
                f"use a dim from {-len(shape)} to {len(shape) - 1}"
                if shape
                else f"{name}: a scalar has no dimension to shard; return None for it, every rank then keeps a copy"
            )
        rows = (
            Extent(chunk.start + part.start, part.numel)
            for chunk in chunks(shape[dim], num_ranks)
            for part in chunks(chunk.numel, parts)
        )
        return Cut(shape, num_ranks * parts, dim, tuple(rows))


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor: for scalars, which have no dimension to cut."""

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """The numbers for one tensor: one row, held by all."""
        return Cut(shape, num_ranks * parts, None, (Extent(0, 1),) * (num_ranks * parts))
