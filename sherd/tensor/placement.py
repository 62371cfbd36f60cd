"""How does a DTensor's spec say that the tensor is cut into runs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, device_of, dtensor_spec
from sherd.errors import PlacementError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.vectors import VectorShard, counted


class RaggedShard(Shard):
    """The placement of one tensor that is cut into runs, on a mesh axis it is cut over. It belongs to that one tensor
    shape.

    `stride`: how far apart in the cut two neighbours on this axis are. A tensor that is cut over one axis has 1; over
    two, `cut` numbers the ranks of both, and a rank holds run `sum(coordinate * stride)` of it:

        mesh (outer 2, inner 3): outer has stride 1, inner has stride 2        inner 0   inner 1   inner 2
                                                                      outer 0 |   0    |    2    |    4    |
                                                                      outer 1 |   1    |    3    |    5    |

    On mesh axes that have other placements (tensor parallel), `cut` is that of the part at this rank's coordinates
    there; ranks at other coordinates may have another one.

    torch takes it for `Shard(0)` wherever it only looks: checkpoints find the tensor sharded. It does not equal
    `Shard(0)`, so `DTensorSpec` refuses it, and no DTensor of torch's own can have it, whose dispatch would take a
    ragged shard for an even one. `sherd._torch.dtensor_spec` puts it into a spec that was made with `stands_for`.
    """

    cut: Runs
    stride: int
    stands_for = Shard(0)
    gave_more = False
    """Whether torch has just asked for the rows that this rank holds, and was told of more (`covering.py`)."""

    def __new__(cls, cut: Runs, stride: int = 1) -> RaggedShard:
        """The C++ part of the placement is that of `Shard(0)`."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # its C++ base has no annotations

    def __init__(self, cut: Runs, stride: int = 1) -> None:
        super().__init__(0)
        self.cut = cut
        self.stride = stride

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RaggedShard)
            and self.stride == other.stride
            and (self.cut is other.cut or self.cut == other.cut)
        )

    def __hash__(self) -> int:
        return hash((self.cut, self.stride))

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: Any, rank: Any) -> tuple[int, int]:
        """The rows that a rank holds, and the first of them; the rows around its run, if that is not of whole rows. All
        there are, if the run does not follow from one mesh axis alone.

        torch asks when it copies from a whole tensor that it has broadcast. It does so by position and keyword.
        """
        cut = self.cut
        if num_chunks != cut.num_ranks or not cut.shape or curr_local_size != cut.shape[0]:
            self.gave_more = True
            return curr_local_size, 0
        piece = cut.piece(rank)
        self.gave_more = not cut.by_rows and len(cut.shape) > 1
        if not piece.numel or not cut.inner:
            return (cut.local_shape(rank)[0] if cut.by_rows else 0), 0
        first = piece.start // cut.inner
        return -(-piece.stop // cut.inner) - first, first

    def __repr__(self) -> str:
        cut = self.cut
        unit = "rows" if cut.by_rows else "elements"
        sizes = [cut.local_shape(rank)[0] for rank in range(cut.num_ranks)]
        return f"RaggedShard({unit}={sizes}{f', stride={self.stride}' if self.stride != 1 else ''})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.cut, self.stride)

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self


def ragged_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    cut: Runs,
    axes: Sequence[int],
) -> DTensorSpec:
    """The spec of a ragged tensor: what `ragged_dtensor` and `distribute_ragged` ask for.

        one axis              mesh (dp,)             axes (0,)      placements (Replicate(),)
        replicas              mesh (replicate, dp)   axes (1,)      placements (Replicate(), Replicate())
        over TP               mesh (dp, tp)          axes (0,)      placements (Replicate(), Shard(1))
        over two axes         mesh (outer, inner)    axes (1, 0)    placements (Replicate(), Replicate())
        both                  mesh (outer, inner, tp)    axes (1, 0)    placements (Replicate(), Replicate(), Shard(0))

    Args:
        mesh: all axes that the tensor lies on.
        placements: what the tensor is before it is cut, one for each axis of `mesh`: `Replicate()` on `axes`;
            `Replicate()` or `Shard(dim)`, of any size, on the others.
        shape: that of the whole tensor.
        dtype: of its elements.
        cut: how the part of the tensor at this rank's coordinates on the other axes is cut: `cut.shape` is the shape of
            that part (the tensor-parallel shard), `cut.num_ranks` the product of the sizes of `axes`. Ranks at the
            same coordinates there have the same cut.
        axes: the mesh axes it is cut over, the slowest first: this rank holds run
            `virtual_rank(mesh, axes)` of `cut`.

    Raises:
        PlacementError: `cut` is for another shape or number of ranks, a placement is missing or of no known kind, or
            this rank is not in the mesh.
    """
    axes = tuple(axes)
    given = tuple(placements)
    if len(given) != mesh.ndim:
        raise PlacementError(f"placements {given} on {mesh}: give one for each of its {mesh.ndim} axes")
    if not axes or any(not given[axis].is_replicate() for axis in axes):
        raise PlacementError(
            f"placements {given} on axes {axes} of {mesh}: a tensor is cut into runs over at least one axis, on which "
            "it was replicated before; give Replicate() there"
        )
    strides = {axis: prod(mesh.size(other) for other in axes[at + 1 :]) for at, axis in enumerate(axes)}
    full = tuple(RaggedShard(cut, strides[axis]) if axis in strides else each for axis, each in enumerate(given))
    return Layout(mesh, full, tuple(shape)).spec(dtype)


def virtual_rank(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """The number of this rank among those of several mesh axes, the slowest first: which run of a cut it holds."""
    rank = 0
    for axis in axes:
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh axis with `Shard(dim)` or `VectorShard` beside the runs: which indices of `dim` each of its ranks has, of
    what the axes to the left have left over. This rank has `extents[rank]`."""

    axis: int
    dim: int
    extents: tuple[Extent, ...]
    rank: int


class Layout:
    """Where one ragged tensor's pieces are, seen from this rank: read once from a spec, kept with it.

    shape: that of the whole tensor.
    splits: the mesh axes with `Shard(dim)`, which cut the tensor before the runs do.
    offsets, cut.shape: the first index and the size, in each dim, of the part that they leave to this rank.
    axes: the mesh axes whose ranks hold the runs of this part, the fastest first; `rank` is this one's number there.
    owner: the one of these ranks that holds the whole tensor, in its own shape; None if there is none.
    joined_axes: the mesh axes that hold different elements: what is reduced is reduced over these.
    copied_axes: the mesh axes that hold the same ones.
    counted: the extents of this rank's run that a reduction counts here, of a flat parameter over tensor parallelism,
        where some of it is counted elsewhere; None if all is.
    strides: those of a tensor at one owner whose elements are not in order there (a transposed view).
    """

    __slots__ = (
        "axes",
        "by_dtype",
        "copied_axes",
        "counted",
        "cut",
        "joined_axes",
        "local_shape",
        "mesh",
        "numel",
        "offsets",
        "owner",
        "placements",
        "rank",
        "shape",
        "shard",
        "splits",
        "strides",
        "value_specs",
    )

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: Shape,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.numel = prod(shape)
        self.strides = strides
        self.shard = _shard_of(placements)
        self.cut = self.shard.cut
        coordinate = mesh.get_coordinate()
        self.axes = _axes_of(mesh, placements, self.cut, coordinate)
        assert coordinate is not None, "or the axes would have been refused"
        self.splits, self.offsets = _splits_of(mesh, placements, shape, self.cut, coordinate)
        self.rank: int = sum(coordinate[axis] * _stride(placements[axis]) for axis in self.axes)
        self.local_shape = self.cut.local_shape(self.rank)
        many = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self.joined_axes = tuple(axis for axis in many if not placements[axis].is_replicate())
        self.copied_axes = tuple(axis for axis in many if placements[axis].is_replicate())
        self.counted = counted(placements, self.cut.piece(self.rank), coordinate)
        sharded = any(each.axis in self.joined_axes for each in self.splits)
        self.owner = None if sharded else _owner(self.cut)
        self.by_dtype: dict[torch.dtype, DTensorSpec] = {}
        self.value_specs: dict[tuple[torch.Size, torch.dtype], DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @property
    def device(self) -> torch.device:
        """Where results live on ranks that had no part in them."""
        return device_of(self.mesh)

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups whose ranks hold different elements: to reduce over all of them is to reduce over the
        tensor."""
        return tuple(self.mesh.get_group(axis) for axis in self.joined_axes)

    @property
    def part_placements(self) -> tuple[Placement, ...]:
        """The placements that the tensor has when its runs, and nothing else, are gathered: torch's, but of a flat
        parameter over tensor parallelism."""
        return tuple(Replicate() if isinstance(each, RaggedShard) else each for each in self.placements)

    @property
    def is_of_vectors(self) -> bool:
        """Whether it is a flat parameter over tensor parallelism."""
        return any(isinstance(each, VectorShard) for each in self.placements)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of a tensor of `dtype` in this layout; the same object each time."""
        found = self.by_dtype.get(dtype)
        if found is None:
            found = dtensor_spec(self.mesh, self.placements, torch.Size(self.shape), dtype, self.strides)
            self.by_dtype[dtype] = attach(found, self)
        return found

    def owned_cut(self, shape: Shape) -> Runs:
        """The cut of another tensor that is where this one is: whole at its owner."""
        assert self.owner is not None, "asked for by those that have an owner"
        return Runs(shape, self.cut.num_ranks, self.owner, (prod(shape),), by_rows=bool(shape))

    def like(self, cut: Runs, strides: tuple[int, ...] | None = None) -> Layout:
        """The layout of a tensor that is cut as `cut` over the same axes: the same part, or one at the owner."""
        if cut == self.cut and strides == self.strides:
            return self
        placements = tuple(
            RaggedShard(cut, each.stride) if isinstance(each, RaggedShard) else each for each in self.placements
        )
        if cut.shape == self.cut.shape:
            return Layout(self.mesh, placements, self.shape, strides)
        # Where there is an owner, other axes shard nothing, but by name.
        assert self.owner is not None, "the part has one shape"
        others = tuple(each if isinstance(each, RaggedShard) else Replicate() for each in placements)
        return Layout(self.mesh, others, cut.shape, strides)

    def same_as(self, other: Layout) -> bool:
        """Whether both say that the same elements are on the same ranks."""
        return self is other or (
            self.placements == other.placements and self.shape == other.shape and self.mesh == other.mesh
        )

    def shares_ranks_with(self, other: Layout) -> bool:
        """Whether the ranks that hold the pieces of both are the same, one by one."""
        return (
            self.axes == other.axes
            and (self.mesh is other.mesh or self.mesh == other.mesh)
            and all(_stride(self.placements[axis]) == _stride(other.placements[axis]) for axis in self.axes)
        )

    def __str__(self) -> str:
        """How the tensor is cut, for error texts."""
        return str(self.placements) if len(self.axes) > 1 or self.splits else str(self.shard)


def _shard_of(placements: tuple[Placement, ...]) -> RaggedShard:
    """The ragged placement of the first axis that has one; all have the same cut."""
    ragged = [each for each in placements if isinstance(each, RaggedShard)]
    others = [each for each in placements if not isinstance(each, RaggedShard)]
    if (
        not ragged
        or any(each.cut != ragged[0].cut for each in ragged)
        or not all(isinstance(each, Replicate | Shard) for each in others)
    ):
        raise PlacementError(
            f"placements {placements}: a ragged tensor has RaggedShard, of one cut, on the axes it is cut over, and "
            "Replicate() or Shard(dim) on the others; reduce what is Partial, and redistribute what is sharded in "
            "another way, before it is cut"
        )
    return ragged[0]


def _stride(placement: Placement) -> int:
    assert isinstance(placement, RaggedShard), "asked for the axes that the runs are on"
    return placement.stride


def _axes_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], cut: Runs, coordinate: Sequence[int] | None
) -> tuple[int, ...]:
    """The axes that the runs are on, the fastest first."""
    axes = [axis for axis, each in enumerate(placements) if isinstance(each, RaggedShard)]
    if len(axes) > 1:
        axes.sort(key=lambda axis: (_stride(placements[axis]), mesh.size(axis)))
    num_ranks, overlap = 1, False
    for axis in axes:
        size = mesh.size(axis)
        overlap = overlap or (size > 1 and _stride(placements[axis]) != num_ranks)
        num_ranks *= size
    if coordinate is None or cut.num_ranks != num_ranks:
        named = " x ".join(f"axis {axis}" for axis in axes)
        sizes = " x ".join(str(mesh.size(axis)) for axis in axes)
        raise PlacementError(
            f"a tensor of shape {cut.shape} is cut for {cut.num_ranks} ranks, but {named} of {mesh} has {sizes}, this "
            f"rank at {coordinate}; plan the cut for the mesh it is used on"
        )
    if overlap:
        raise PlacementError(
            f"placements {placements} on {mesh}: two ranks would hold one run; let the stride of each axis be the "
            "number of ranks on the faster ones (ragged_spec does)"
        )
    return tuple(axes)


def _splits_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape, cut: Runs, coordinate: Sequence[int]
) -> tuple[tuple[Split, ...], Shape]:
    """The axes that shard the tensor on a dim, from left to right, and the first index of what they leave to this rank.

    Raises:
        PlacementError: what they leave is not what is cut into runs.
    """
    splits: list[Split] = []
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, each in enumerate(placements):
        if not isinstance(each, Shard) or isinstance(each, RaggedShard):
            continue
        if not 0 <= each.dim < len(shape):
            raise PlacementError(f"placements {placements}: a tensor of shape {shape} has no dim {each.dim} to shard")
        extents = each.extents if isinstance(each, VectorShard) else chunks(sizes[each.dim], mesh.size(axis))
        splits.append(Split(axis, each.dim, extents, coordinate[axis]))
        mine = splits[-1].extents[coordinate[axis]]
        offsets[each.dim] += mine.start
        sizes[each.dim] = mine.numel
    if tuple(sizes) != cut.shape:
        raise PlacementError(
            f"a cut of shape {cut.shape} cannot place a tensor of shape {shape} with {placements} on {mesh}, of which "
            f"this rank's part has shape {tuple(sizes)}; cut that part"
        )
    return tuple(splits), tuple(offsets)


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
        found = Layout(spec.mesh, spec.placements, tuple(spec.shape))
        assert spec.tensor_meta is not None, "a DTensor's spec has it"
        found.by_dtype[spec.tensor_meta.dtype] = attach(spec, found)
    return found


def is_ragged(spec: DTensorSpec) -> bool:
    """Whether a spec is that of a ragged tensor."""
    return any(isinstance(each, RaggedShard) for each in spec.placements)


_KEY = "sherd_layout"
