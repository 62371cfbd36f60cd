"""Tensors cut into runs of consecutive elements, and the placements that ask for runs. Integers only.

These placements only say where a tensor may be cut. `plan.py` plans the cuts of all tensors of a group at once, so that
every rank gets its share of the group, not of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar, Protocol, runtime_checkable

from sherd.errors import PlacementError
from sherd.layout.placement import Cut, Placement, Shape


@dataclass(frozen=True)
class Runs(Cut):
    """One tensor of `shape`, flattened: rank `first + i` holds the elements from `ends[i - 1]` to `ends[i]`.

        shape (3, 5), 4 ranks, first 1, ends (5, 15), by_rows

        rank 0 |
        rank 1 | 0 1 2 3 4 |
        rank 2 | 5 6 7 8 9 | 10 11 12 13 14 |
        rank 3 |

    Ranks before `first` and after the last holder hold nothing. With `by_rows` a run has complete rows, and a rank's
    shard keeps the tensor's other dims; otherwise a shard is 1-D.
    """

    by_rows: bool = False
    owned: bool = field(default=False, compare=False, repr=False)
    """True if the tensor was not to be cut, which others may only happen not to be."""

    in_line: ClassVar[bool] = True
    in_order: ClassVar[bool] = False
    """A run may begin and end anywhere, so shards are not padded to one length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.by_rows or all(end % max(self.inner, 1) == 0 for end in self.ends), "a row is cut in two"

    @cached_property
    def view(self) -> tuple[int, int, int]:
        """Every element is a row of its own."""
        return 1, self.numel, 1

    @cached_property
    def inner(self) -> int:
        """Elements of one index of dim 0."""
        return prod(self.shape[1:])

    def local_shape(self, rank: int) -> Shape:
        """Returns the shape of `rank`'s shard."""
        numel = self.local_numel(rank)
        if not self.by_rows or not self.shape:
            return (numel,)
        # The first holder has all rows of a tensor without elements (shape (3, 0)).
        num_rows = numel // self.inner if self.inner else self.shape[0] * (rank == self.first)
        return (num_rows, *self.shape[1:])


@runtime_checkable
class RunPlacement(Protocol):
    """A rule that says where a flattened tensor may be cut."""

    @property
    def owned(self) -> bool:
        """True if the tensor goes to one rank, uncut."""

    @property
    def together(self) -> bool:
        """True if one plan cuts all such tensors of a unit; otherwise a large tensor may have a plan of its own."""

    def grain(self, shape: Shape, name: str) -> int:
        """Returns the elements of one block, at least 1. Cuts fall between blocks. `name` is for the error message."""
        ...

    def by_rows(self, shape: Shape) -> bool:
        """Returns True if a rank's shard has complete rows."""
        ...


@lru_cache(maxsize=256)
def whole_on(owner: int, shape: Shape, num_ranks: int) -> Runs:
    """Returns the cut of a tensor that `owner`, one of `num_ranks` ranks, holds unsharded."""
    return Runs(shape, num_ranks, owner, (prod(shape),), by_rows=bool(shape), owned=True)


AnyPlacement = Placement | RunPlacement
"""A rule by which one tensor is cut: by itself, or with the others of its group."""


@dataclass(frozen=True)
class Flat:
    """Cut between any two elements, which takes the fewest bytes. A rank's shard is 1-D. For element-wise optimizers.

    The flat parameters of ZeRO (Rajbhandari et al. 2020) and FSDP1 (Zhao et al. 2023) are cut like this.

    Args:
        together: keep all tensors of a unit in one line, as a flat parameter needs. Otherwise large tensors travel
            alone on devices without streams.
    """

    together: bool = field(default=False, repr=False)
    owned: ClassVar[bool] = False

    def grain(self, shape: Shape, name: str) -> int:
        """Returns 1: one element."""
        return 1

    def by_rows(self, shape: Shape) -> bool:
        """Returns False."""
        return False


@dataclass(frozen=True)
class Blocks:
    """Cut between blocks of `rows` rows (indices of dim 0). The last block of a tensor may be shorter.

    For block-quantised training and row-wise optimizers. The rows of a vector are its elements.

    Raises:
        PlacementError: `rows` is not a positive int.
    """

    rows: int = 1
    owned: ClassVar[bool] = False
    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise PlacementError(f"Blocks(rows={self.rows!r}): expected a positive int, the rows of one block")

    def grain(self, shape: Shape, name: str) -> int:
        """Returns the elements of `rows` rows."""
        return max(1, self.rows * prod(shape[1:]))

    def by_rows(self, shape: Shape) -> bool:
        """Returns True, except for scalars."""
        return bool(shape)


@dataclass(frozen=True)
class Owned:
    """Do not cut: each tensor has one owner. Owners are chosen so that their loads balance.

    For optimizers that need unsharded matrices: Shampoo (Gupta et al. 2018), Muon (Jordan et al. 2024).
    """

    owned: ClassVar[bool] = True
    together: ClassVar[bool] = True

    def grain(self, shape: Shape, name: str) -> int:
        """Returns all elements."""
        return max(1, prod(shape))

    def by_rows(self, shape: Shape) -> bool:
        """Returns True, except for scalars."""
        return bool(shape)
