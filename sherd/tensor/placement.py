"""The placement of a tensor that is cut into runs, in a DTensor's spec, and the layout that is read from it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, asked_by_spec
from sherd.errors import PlacementError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.places import Places
from sherd.tensor.vectors import UnevenShard, VectorShard, counted


class RaggedShard(UnevenShard):
    """The placement of one tensor that is cut into runs, on a mesh axis it is cut over: the ragged
    shard of veScale-FSDP and Megatron-FSDP. It belongs to one tensor shape.

    `stride`: how far apart in the cut two neighbours on this axis are. For a tensor that is cut over one axis it is 1.
    Over two axes, `cut` numbers the ranks of both, and a rank holds run `sum(coordinate * stride)` of it:

        mesh (outer 2, inner 3): outer has stride 1, inner has stride 2        inner 0   inner 1   inner 2
                                                                      outer 0 |   0    |    2    |    4    |
                                                                      outer 1 |   1    |    3    |    5    |

    If other mesh axes shard the tensor too (tensor parallel), `cut` cuts the part at this rank's coordinates there;
    ranks at other coordinates may have another cut.

    torch takes it for `Shard(0)` wherever it only looks: checkpoints find the tensor sharded. It does not equal
    `Shard(0)`, so `DTensorSpec` refuses it: torch's own DTensors cannot have it, as their dispatch would take a ragged
    shard for an even one. `sherd._torch.dtensor_spec` puts it into a spec that was made with `stands_for`.
    """

    cut: Runs
    stride: int

    def __init__(self, cut: Runs, stride: int = 1) -> None:
        super().__init__(0)
        self.cut = cut
        self.stride = stride

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedShard) and asked_by_spec():
            raise PlacementError(
                f"{self} is the placement of a RaggedDTensor, which DTensor.from_local does not make; make one like "
                "another that lies so: made = torch.empty_like(it), and then made.to_local().copy_(local)"
            )
        return (
            isinstance(other, RaggedShard)
            and self.stride == other.stride
            and (self.cut is other.cut or self.cut == other.cut)
        )

    def __hash__(self) -> int:
        return hash((self.cut, self.stride))

    def __repr__(self) -> str:
        cut = self.cut
        unit = "rows" if cut.by_rows else "elements"
        sizes = [cut.local_shape(rank)[0] for rank in range(cut.num_ranks)]
        return f"RaggedShard({unit}={sizes}{f', stride={self.stride}' if self.stride != 1 else ''})"

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[Runs, int]]:
        return RaggedShard, (self.cut, self.stride)


def ragged_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    cut: Runs,
    axes: Sequence[int],
) -> DTensorSpec:
    """Returns the spec of a ragged tensor, which `ragged_dtensor` and `distribute_ragged` take.

        one axis              mesh (dp,)             axes (0,)      placements (Replicate(),)
        replicas              mesh (replicate, dp)   axes (1,)      placements (Replicate(), Replicate())
        over TP               mesh (dp, tp)          axes (0,)      placements (Replicate(), Shard(1))
        over two axes         mesh (outer, inner)    axes (1, 0)    placements (Replicate(), Replicate())
        both                  mesh (outer, inner, tp)    axes (1, 0)    placements (Replicate(), Replicate(), Shard(0))

    Args:
        mesh: all axes that the tensor lies on.
        placements: the tensor's placements before it is cut, one for each axis of `mesh`: `Replicate()` on `axes`;
            `Replicate()` or `Shard(dim)`, of any size, on the others.
        shape: the shape of the unsharded tensor.
        dtype: the dtype of its elements.
        cut: how the part of the tensor at this rank's coordinates on the other axes is cut: `cut.shape` is the shape of
            that part (the tensor-parallel shard), `cut.num_ranks` the product of the sizes of `axes`. Ranks at the
            same coordinates there have the same cut.
        axes: the mesh axes it is cut over, the slowest first: this rank holds run `virtual_rank(mesh, axes)` of `cut`.

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
    """Returns the number of this rank among those of several mesh axes, the slowest first: the run that it holds."""
    rank = 0
    for axis in axes:
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh axis with `Shard(dim)` or `VectorShard` beside the runs, and the indices of `dim` that each of its ranks
    has, counted in what the axes to the left leave. This rank has `extents[rank]`."""

    axis: int
    dim: int
    extents: tuple[Extent, ...]
    rank: int


class Layout(Places):
    """The places of one ragged tensor's pieces, seen from this rank.

    ragged: the placements of the mesh axes that it is cut into runs over, by axis; all have the same `cut`.
    splits: the mesh axes with `Shard(dim)`, which cut the tensor before the runs do.
    offsets, cut.shape: the first index and the size, in each dim, of the part that the splits leave to this rank.
    axes: the mesh axes whose ranks hold the runs of this part, the fastest first. `rank` is this rank's number there.
    owner: the one of these ranks that holds the tensor unsharded, in its own shape; None if there is none.
    """

    __slots__ = ("axes", "cut", "local_shape", "offsets", "owner", "ragged", "rank", "splits")

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: Shape,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(mesh, placements, shape, strides)
        self.ragged, sharded = _by_axis(placements)
        self.cut = next(iter(self.ragged.values())).cut
        coordinate = mesh.get_coordinate()
        self.axes = self._axes_of_runs(coordinate)
        assert coordinate is not None, "or the axes would have been refused"
        vectors = {axis: each for axis, each in sharded.items() if isinstance(each, VectorShard)}
        self.is_of_vectors = bool(vectors)
        self.splits, self.offsets = self._splits_before_runs(sharded, vectors, coordinate)
        self.rank: int = sum(coordinate[axis] * self.ragged[axis].stride for axis in self.axes)
        self.local_shape = self.cut.local_shape(self.rank)
        self.counted = counted(vectors, self.cut.piece(self.rank), coordinate)
        self.owner = None if any(axis in self.joined_axes for axis in sharded) else _owner(self.cut)

    def _axes_of_runs(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the axes that the runs are on, the fastest first."""
        mesh, ragged, cut = self.mesh, self.ragged, self.cut
        axes = sorted(ragged, key=lambda axis: (ragged[axis].stride, mesh.size(axis)))
        num_ranks, overlap = 1, False
        for axis in axes:
            size = mesh.size(axis)
            overlap = overlap or (size > 1 and ragged[axis].stride != num_ranks)
            num_ranks *= size
        if coordinate is None or cut.num_ranks != num_ranks:
            named = " x ".join(f"axis {axis}" for axis in axes)
            sizes = " x ".join(str(mesh.size(axis)) for axis in axes)
            raise PlacementError(
                f"a tensor of shape {cut.shape} is cut for {cut.num_ranks} ranks, but {named} of {mesh} has {sizes}, "
                f"this rank at {coordinate}; plan the cut for the mesh it is used on"
            )
        if overlap:
            raise PlacementError(
                f"placements {self.placements} on {mesh}: two ranks would hold one run; let the stride of each axis be "
                "the number of ranks on the faster ones (ragged_spec does)"
            )
        return tuple(axes)

    def _splits_before_runs(
        self, sharded: Mapping[int, Shard], vectors: Mapping[int, VectorShard], coordinate: Sequence[int]
    ) -> tuple[tuple[Split, ...], Shape]:
        """Returns the axes that shard the tensor on a dim, from left to right, and the first index of what they leave
        to this rank. The placements in `vectors` say how many elements each rank has, others cut evenly.

        Raises:
            PlacementError: what they leave is not what is cut into runs.
        """
        mesh, shape = self.mesh, self.shape
        splits: list[Split] = []
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, placement in sharded.items():
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise PlacementError(
                    f"placements {self.placements}: a tensor of shape {shape} has no dim {dim} to shard"
                )
            extents = vectors[axis].extents if axis in vectors else chunks(sizes[dim], mesh.size(axis))
            splits.append(Split(axis, dim, extents, coordinate[axis]))
            offsets[dim] += extents[coordinate[axis]].start
            sizes[dim] = extents[coordinate[axis]].numel
        if tuple(sizes) != self.cut.shape:
            raise PlacementError(
                f"a cut of shape {self.cut.shape} cannot place a tensor of shape {shape} with {self.placements} on "
                f"{mesh}, of which this rank's part has shape {tuple(sizes)}; cut that part"
            )
        return tuple(splits), tuple(offsets)

    @property
    def part_placements(self) -> tuple[Placement, ...]:
        """The placements of the tensor once its runs are gathered, and nothing else. They are torch's own, unless it is
        a flat parameter over tensor parallelism."""
        return tuple(Replicate() if axis in self.ragged else each for axis, each in enumerate(self.placements))

    def owned_cut(self, shape: Shape) -> Runs:
        """Returns the cut of a tensor of `shape` that is where this one is: unsharded at its owner."""
        assert self.owner is not None, "asked for by those that have an owner"
        return Runs(shape, self.cut.num_ranks, self.owner, (prod(shape),), by_rows=bool(shape))

    def like(self, cut: Runs, strides: tuple[int, ...] | None = None) -> Layout:
        """Returns the layout of a tensor that is cut as `cut` over the same axes: of this part, or one at the owner."""
        if cut == self.cut and strides == self.strides:
            return self
        if cut.shape == self.cut.shape:
            return self.recut(cut, self.shape, self.placements, strides)
        # Where there is an owner, the other axes shard nothing: a `Shard(dim)` is on an axis of one rank.
        assert self.owner is not None, "the part has one shape"
        return self.recut(cut, cut.shape, (Replicate(),) * self.mesh.ndim, strides)

    def recut(
        self, cut: Runs, shape: Shape, others: tuple[Placement, ...], strides: tuple[int, ...] | None = None
    ) -> Layout:
        """Returns the layout of a tensor of `shape` that is cut as `cut` over the same axes, and has the placements
        `others` on the other axes."""
        ragged = {axis: RaggedShard(cut, placement.stride) for axis, placement in self.ragged.items()}
        return Layout(self.mesh, tuple(ragged.get(axis, each) for axis, each in enumerate(others)), shape, strides)

    def same_as(self, other: Places) -> bool:
        """Returns True if both tensors have the same elements on the same ranks, in the same order."""
        return self is other or (super().same_as(other) and self.strides == other.strides)

    def shares_ranks_with(self, other: Layout) -> bool:
        """Returns True if the same ranks hold the pieces of both tensors, one by one."""
        return (
            self.axes == other.axes
            and (self.mesh is other.mesh or self.mesh == other.mesh)
            and all(self.ragged[axis].stride == other.ragged[axis].stride for axis in self.axes)
        )

    def __str__(self) -> str:
        """Returns the placements of the runs, for error texts."""
        return str(self.placements) if len(self.axes) > 1 or self.splits else str(self.ragged[self.axes[0]])


def _by_axis(placements: tuple[Placement, ...]) -> tuple[dict[int, RaggedShard], dict[int, Shard]]:
    """Returns the ragged placements, and the others that shard a dim, by mesh axis. All other axes have copies.

    Raises:
        PlacementError: no placement is ragged, they have different cuts, or an axis has one of no known kind.
    """
    ragged: dict[int, RaggedShard] = {}
    sharded: dict[int, Shard] = {}
    is_known = True
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            ragged[axis] = placement
        elif isinstance(placement, Shard):
            sharded[axis] = placement
        else:
            is_known = is_known and placement.is_replicate()
    cuts = [placement.cut for placement in ragged.values()]
    if not is_known or not cuts or any(cut != cuts[0] for cut in cuts):
        raise PlacementError(
            f"placements {placements}: a ragged tensor has RaggedShard, of one cut, on the axes it is cut over, and "
            "Replicate() or Shard(dim) on the others; reduce what is Partial, and redistribute what is sharded in "
            "another way, before it is cut"
        )
    return ragged, sharded


def _owner(cut: Runs) -> int | None:
    """Returns the rank that holds the tensor unsharded, in its own shape, if there is one: it can do any operation
    alone."""
    if cut.shape and not cut.by_rows:
        return None
    holding = [rank for rank in cut.holders if cut.local_numel(rank)]
    return cut.first if not holding else holding[0] if len(holding) == 1 else None


def layout_of(spec: DTensorSpec) -> Layout:
    """Returns the layout that the spec of a ragged tensor describes.

    Raises:
        PlacementError: no ragged tensor can have this spec.
    """
    found: Layout | None = spec.__dict__.get("sherd_places")
    if found is None:
        found = Layout(spec.mesh, spec.placements, tuple(spec.shape))
        found.keep_with(spec)
    return found


def places_of(spec: DTensorSpec) -> Places:
    """Returns the places that the spec of any sharded tensor describes, of runs or of equal chunks."""
    found: Places | None = spec.__dict__.get("sherd_places")
    if found is None:
        if has_ragged(spec.placements):
            return layout_of(spec)
        # Torch hands its specs on, also to files; so these places are kept with specs of their own only.
        key = id(spec.mesh), spec.placements, spec.shape, spec.stride
        found = _alike.get(key)
        if found is None:
            found = _alike[key] = Places(spec.mesh, spec.placements, tuple(spec.shape), spec.stride)
    return found


# Tensors that lie alike have the same object, so that lists of them are compared at once. It keeps the mesh.
_alike: weakref.WeakValueDictionary[object, Places] = weakref.WeakValueDictionary()


def in_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns `spec` for a tensor of `dtype`."""
    assert spec.tensor_meta is not None, "a DTensor's spec knows its dtype"
    return spec if spec.tensor_meta.dtype == dtype else places_of(spec).spec(dtype)


def has_ragged(placements: Sequence[Placement]) -> bool:
    """Returns True if one of the placements is a ragged shard."""
    return any(isinstance(placement, RaggedShard) for placement in placements)


def is_ragged(spec: DTensorSpec) -> bool:
    """Returns True if a spec is that of a ragged tensor."""
    return has_ragged(spec.placements)
