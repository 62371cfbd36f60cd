"""How does a DTensor's spec say that the tensor is cut into runs?"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, device_of, dtensor_spec
from sherd.errors import PlacementError
from sherd.layout.runs import Runs


class RaggedShard(Shard):
    """The placement of one tensor that is cut into runs, on the mesh axis it is cut over. It belongs to that one tensor
    shape.

    torch takes it for `Shard(0)` wherever it only looks: checkpoints find the tensor sharded. It does not equal
    `Shard(0)`, so `DTensorSpec` refuses it, and no DTensor of torch's own can have it, whose dispatch would take a
    ragged shard for an even one. `sherd._torch.dtensor_spec` puts it into a spec that was made with `stands_for`.
    """

    cut: Runs
    stands_for = Shard(0)
    rows_asked_for = False
    """Whether torch has just asked for the rows that this rank holds (`covering.py`)."""

    def __new__(cls, cut: Runs) -> RaggedShard:
        """The C++ part of the placement is that of `Shard(0)`."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # its C++ base has no annotations

    def __init__(self, cut: Runs) -> None:
        super().__init__(0)
        self.cut = cut

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.cut is other.cut or self.cut == other.cut)

    def __hash__(self) -> int:
        return hash(self.cut)

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: Any, rank: Any) -> tuple[int, int]:
        """The rows that a rank holds, and the first of them; the rows around its run, if that is not of whole rows.

        torch asks when it copies from a whole tensor that it has broadcast. It does so by position and keyword.
        """
        self.rows_asked_for = True
        cut = self.cut
        piece = cut.piece(rank)
        if not piece.numel or not cut.inner:
            return (cut.local_shape(rank)[0] if cut.by_rows else 0), 0
        first = piece.start // cut.inner
        return -(-piece.stop // cut.inner) - first, first

    def __repr__(self) -> str:
        cut = self.cut
        unit = "rows" if cut.by_rows else "elements"
        sizes = [cut.local_shape(rank)[0] for rank in range(cut.num_ranks)]
        return f"RaggedShard({unit}={sizes})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.cut,)

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self


class Layout:
    """Where one ragged tensor's pieces are, seen from this rank: read once from a spec, kept with it.

    `strides` are those of a tensor at one owner whose elements are not in order there (a transposed view).
    """

    __slots__ = (
        "axis",
        "by_dtype",
        "cut",
        "local_shape",
        "mesh",
        "owner",
        "placements",
        "rank",
        "shard",
        "strides",
        "value_specs",
    )

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], strides: tuple[int, ...] | None = None
    ) -> None:
        axes = [axis for axis, each in enumerate(placements) if isinstance(each, RaggedShard)]
        others = [each for each in placements if not isinstance(each, RaggedShard)]
        if len(axes) != 1 or not all(isinstance(each, Replicate) for each in others):
            raise PlacementError(
                f"placements {placements}: a ragged tensor has one RaggedShard and, on the other axes, Replicate; "
                "shard over one axis, or flatten the axes into one"
            )
        self.axis = axes[0]
        self.mesh = mesh
        self.placements = placements
        self.strides = strides
        shard = placements[self.axis]
        assert isinstance(shard, RaggedShard), "found by its type"
        self.shard = shard
        self.cut = shard.cut
        coordinate = mesh.get_coordinate()
        if coordinate is None or self.cut.num_ranks != mesh.size(self.axis):
            raise PlacementError(
                f"a tensor of shape {self.cut.shape} is cut for {self.cut.num_ranks} ranks, but axis {self.axis} of "
                f"{mesh} has {mesh.size(self.axis)}, this rank at {coordinate}; plan the cut for the mesh it is used on"
            )
        self.rank: int = coordinate[self.axis]
        self.local_shape = self.cut.local_shape(self.rank)
        self.owner = _owner(self.cut)
        self.by_dtype: dict[torch.dtype, DTensorSpec] = {}
        self.value_specs: dict[tuple[torch.Size, torch.dtype], DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def device(self) -> torch.device:
        """Where results live on ranks that had no part in them."""
        return device_of(self.mesh)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that hold the pieces of one copy of the tensor."""
        return self.mesh.get_group(self.axis)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of a tensor of `dtype` in this layout; the same object each time."""
        found = self.by_dtype.get(dtype)
        if found is None:
            found = dtensor_spec(self.mesh, self.placements, torch.Size(self.cut.shape), dtype, self.strides)
            self.by_dtype[dtype] = attach(found, self)
        return found

    def owned_cut(self, shape: tuple[int, ...]) -> Runs:
        """The cut of another tensor that is where this one is: whole at its owner."""
        assert self.owner is not None, "asked for by those that have an owner"
        return Runs(shape, self.cut.num_ranks, self.owner, (prod(shape),), by_rows=bool(shape))

    def like(self, cut: Runs, strides: tuple[int, ...] | None = None) -> Layout:
        """The layout of a tensor that is cut as `cut` over the same axis."""
        if cut == self.cut and strides == self.strides:
            return self
        placements = (*self.placements[: self.axis], RaggedShard(cut), *self.placements[self.axis + 1 :])
        return Layout(self.mesh, placements, strides)

    def same_as(self, other: Layout) -> bool:
        """Whether both say that the same elements are on the same ranks."""
        return self is other or (self.placements == other.placements and self.mesh == other.mesh)


def _owner(cut: Runs) -> int | None:
    """The rank that holds all of a tensor in its own shape, when there is one: it can do any operation alone."""
    if cut.shape and not cut.by_rows:
        return None
    holding = [rank for rank in cut.holders if cut.local_numel(rank)]
    return cut.first if not holding else holding[0] if len(holding) == 1 else None


def attach(spec: DTensorSpec, layout: Layout) -> DTensorSpec:
    """Keep `layout` with `spec`, for `layout_of`."""
    spec.__dict__[_KEY] = layout
    return spec


def layout_of(spec: DTensorSpec) -> Layout:
    """The layout that a spec describes. Raises `PlacementError` for a spec that no ragged tensor can have."""
    found: Layout | None = spec.__dict__.get(_KEY)
    if found is None:
        found = Layout(spec.mesh, spec.placements)
        if found.cut.shape != tuple(spec.shape):
            raise PlacementError(f"a cut of shape {found.cut.shape} cannot place a tensor of shape {tuple(spec.shape)}")
        assert spec.tensor_meta is not None, "a DTensor's spec has it"
        found.by_dtype[spec.tensor_meta.dtype] = attach(spec, found)
    return found


def is_ragged(spec: DTensorSpec) -> bool:
    """Whether a spec is that of a ragged tensor."""
    return any(isinstance(each, RaggedShard) for each in spec.placements)


_KEY = "sherd_layout"
