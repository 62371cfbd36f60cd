"""Placements and cuts: how one tensor is divided over one mesh axis, and what each rank holds of it. Integers only.

A placement is a rule (`Shard(dim)`, `Replicate()`). Applied to a shape and a number of ranks, it gives a `Cut`: the
numbers that everything else works with. A packing reads only the sizes of a cut, so a new placement is a new class
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import ClassVar, Protocol

from sherd.errors import PlacementError
from sherd.layout.extent import Extent, chunks

Shape = tuple[int, ...]


class Placement(Protocol):
    """A rule that cuts a tensor over the ranks of one mesh axis."""

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """Returns the cut of one tensor over `num_ranks` ranks, with each rank's shard cut once more into `parts`.

        Raises `PlacementError`, whose message has `name`.
        """
        ...


@dataclass(frozen=True)
class Cut:
    """One tensor of `shape`, seen as `[outer, size, inner]` (`view`), with its middle axis, of rows, cut over ranks.

    Rank `first + i` of `num_ranks` holds the rows from `ends[i - 1]` to `ends[i]`, for every outer index. The class
    `Cut` itself is the cut of `Shard(dim)`, and its rows are the indices of `dim`:

        shape (3, 5), dim 0, 2 ranks           shape (2, 5), dim 1, 2 ranks
        rank 0 | row 0 | row 1 |               rank 0 | r0: 0 1 2 | r1: 0 1 2 |
        rank 1 | row 2 |  pad  |               rank 1 | r0: 3 4 . | r1: 3 4 . |

    In the gathered buffer each rank's shard takes `slot` elements, the size of the largest shard: its own elements,
    then padding. `Copies` and `Runs` have other rows, and no `dim`. Sums over all ranks are computed once, since there
    may be thousands of ranks.
    """

    shape: Shape
    num_ranks: int
    first: int
    ends: tuple[int, ...]
    dim: int | None = field(default=None, kw_only=True, repr=False)

    in_line: ClassVar[bool] = False
    """True if the tensors of a group form one line, of which each rank holds a run; False if it has a shard of each."""

    def __post_init__(self) -> None:
        assert self.first >= 0 and self.ends, f"a tensor of shape {self.shape} has no owner"
        assert self.first + len(self.ends) <= self.num_ranks, (
            f"shards of shape {self.shape} go to ranks that do not exist"
        )
        assert self.ends[-1] == self.view[1], (
            f"shards of shape {self.shape} end at {self.ends[-1]}, not at its last element"
        )
        assert all(a <= b for a, b in pairwise((0, *self.ends))), f"shards go backwards: {self.ends}"

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def view(self) -> tuple[int, int, int]:
        """The shape of the tensor when its dims before and behind `dim` are flattened."""
        assert self.dim is not None, "Shard cuts a dimension"
        return prod(self.shape[: self.dim]), self.shape[self.dim], prod(self.shape[self.dim + 1 :])

    @property
    def holders(self) -> range:
        """The ranks that own a shard; a shard may be empty."""
        return range(self.first, self.first + len(self.ends))

    def piece(self, rank: int) -> Extent:
        at = rank - self.first
        if not 0 <= at < len(self.ends):
            return Extent(0 if at < 0 else self.view[1], 0)
        start = self.ends[at - 1] if at else 0
        return Extent(start, self.ends[at] - start)

    @cached_property
    def rows(self) -> tuple[Extent, ...]:
        pieces = (Extent(start, end - start) for start, end in pairwise((0, *self.ends)))
        num_behind = self.num_ranks - self.first - len(self.ends)
        return (*[Extent(0, 0)] * self.first, *pieces, *[Extent(self.view[1], 0)] * num_behind)

    @cached_property
    def slot(self) -> int:
        outer, _, inner = self.view
        return outer * self._most * inner

    @cached_property
    def in_order(self) -> bool:
        """True if the ranks' padded shards, one after the other, begin with the tensor in its own order."""
        outer, size, _ = self.view
        return outer == 1 and all(rows.start == min(rank * self._most, size) for rank, rows in enumerate(self.rows))

    @cached_property
    def _most(self) -> int:
        return max(rows.numel for rows in self.rows)

    @cached_property
    def unsharded_numel(self) -> int:
        """Elements of the tensor in the unsharded buffer: with the padding of its shards if it is cut in order."""
        return self.num_ranks * self.slot if self.in_order else self.numel

    @cached_property
    def num_holders(self) -> int:
        return sum(self.local_numel(rank) > 0 for rank in range(self.num_ranks))

    def local_shape(self, rank: int) -> Shape:
        assert self.dim is not None, "Shard cuts a dimension"
        return (*self.shape[: self.dim], self.piece(rank).numel, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        outer, _, inner = self.view
        return outer * self.piece(rank).numel * inner


class Copies(Cut):
    """One row, the full tensor, which every rank holds."""

    in_order = True

    @cached_property
    def view(self) -> tuple[int, int, int]:
        """All elements are in the one row."""
        return 1, 1, self.numel

    @cached_property
    def rows(self) -> tuple[Extent, ...]:
        """Each rank's row, which is always the one row."""
        return (Extent(0, 1),) * self.num_ranks

    def piece(self, rank: int) -> Extent:
        return self.rows[rank]

    def local_shape(self, rank: int) -> Shape:
        return self.shape


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut on dimension `dim`, counted from the end if negative, as `torch.chunk` cuts. Shards may be unequal and empty.

    This is the placement of FSDP2's parameters (`torch.distributed.fsdp.fully_shard`).
    """

    dim: int = 0

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        """Returns the cut of one tensor. Raises `PlacementError` if it has no such dimension.

        5 rows over 2 ranks, in 2 parts each, are cut into 2, 1 and 1, 1.
        """
        dim = self.dim + len(shape) if self.dim < 0 else self.dim
        if not 0 <= dim < len(shape):
            raise PlacementError(
                f"{name}: Shard({self.dim}) asks for a dimension that a tensor of shape {shape} does not have; "
                f"use a dim from {-len(shape)} to {len(shape) - 1}"
                if shape
                else f"{name}: a scalar has no dimension to shard; return None for it, every rank then keeps a copy"
            )
        return _cut(shape, dim, num_ranks, parts)


# Cached, since a cut has sums over all ranks and the blocks of a model are alike.
@lru_cache(maxsize=64)
def _cut(shape: Shape, dim: int, num_ranks: int, parts: int) -> Cut:
    ends = (
        chunk.start + part.start + part.numel
        for chunk in chunks(shape[dim], num_ranks)
        for part in chunks(chunk.numel, parts)
    )
    return Cut(shape, num_ranks * parts, 0, tuple(ends), dim=dim)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the full tensor. For scalars, which have no dimension to cut."""

    def cut(self, shape: Shape, num_ranks: int, name: str, parts: int = 1) -> Cut:
        return Copies(shape, num_ranks * parts, 0, (1,) * (num_ranks * parts))
