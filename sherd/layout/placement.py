"""How one tensor is cut over one mesh axis, and what each rank holds of it. Integers only.

A placement is a rule (`Shard(dim)`, `Replicate()`). Applied to a shape and a number of ranks, it gives a `Cut`, the
numbers that everything else works with. A packing asks a cut for its sizes only, so a new placement is a new class
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
        """Cut one tensor over `num_ranks` ranks, and each rank's piece once more into `parts`. `name` is for the error
        message. Raises `PlacementError`."""
        ...


@dataclass(frozen=True)
class Cut:
    """One tensor of `shape`, cut over `num_ranks` ranks along `dim`; `dim` is None when every rank holds all of it.

    Seen as `[outer, size, inner]` around `dim`, rank r holds `rows[r]` of the middle axis, for every outer index:

        shape (3, 5), dim 0, 2 ranks           shape (2, 5), dim 1, 2 ranks
        rank 0 | row 0 | row 1 |               rank 0 | r0: 0 1 2 | r1: 0 1 2 |
        rank 1 | row 2 |  pad  |               rank 1 | r0: 3 4 . | r1: 3 4 . |

    In the gathered buffer each rank's piece takes `slot` elements, as many as the largest piece has: its own elements,
    then padding. Every number is computed once, since some need a look at all ranks, and there may be thousands.
    """

    shape: Shape
    num_ranks: int
    dim: int | None
    rows: tuple[Extent, ...]

    @cached_property
    def outer(self) -> int:
        """The product of the sizes before `dim`."""
        return prod(self.shape[: self.dim]) if self.dim is not None else 1

    @cached_property
    def inner(self) -> int:
        """The product of the sizes after `dim`."""
        return prod(self.shape[self.dim + 1 :]) if self.dim is not None else prod(self.shape)

    @cached_property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @cached_property
    def slot(self) -> int:
        """Elements that each rank's piece takes in a buffer, with padding."""
        return self.outer * max(extent.numel for extent in self.rows) * self.inner

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' padded pieces, one after the other, begin with the tensor in its own order."""
        if self.dim is None or self.outer != 1:
            return self.outer == 1
        size, most = self.shape[self.dim], max(extent.numel for extent in self.rows)
        return all(extent.start == min(rank * most, size) for rank, extent in enumerate(self.rows))

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements that the tensor takes in the unsharded buffer: with the padding of its pieces if it is cut in order,
        else without."""
        return self.num_ranks * self.slot if self.in_order else self.numel

    @cached_property
    def num_rows_held(self) -> int:
        """Rows that all ranks hold together: the size of the middle axis, or one for each copy."""
        return sum(extent.numel for extent in self.rows)

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether each rank's rows begin where those of the rank before end."""
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
    """Cut on tensor dimension `dim`, counted from the end if negative, as `torch.chunk` does. Pieces may be unequal and
    empty. This is the placement of FSDP2's parameters (`torch.distributed.fsdp.fully_shard`)."""

    dim: int = 0

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """Cut one tensor. Raises `PlacementError` if it has no such dimension.

        5 rows over 2 ranks, in 2 parts each, are 2, 1 and 1, 1.
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
    """Every rank holds the whole tensor. For scalars, which have no dimension to cut."""

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """One row, which every rank holds."""
        return Cut(shape, num_ranks * parts, None, (Extent(0, 1),) * (num_ranks * parts))
