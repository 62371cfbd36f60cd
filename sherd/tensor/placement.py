"""Where the elements of a sharded tensor are: the placement of runs in a DTensor's spec, and what is read from a spec.

`Places` says it of any sharded tensor, `Layout` of a ragged one. Both are read once from a spec, and kept with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, asked_by_spec, device_of, dtensor_spec
from sherd.errors import PlacementError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.vectors import UnevenShard, VectorShard, counted


class Places:
    """The places of one tensor's shards.

    Attributes:
        shape: the shape of the unsharded tensor.
        strides: the strides of a tensor whose elements are not in order (`channels_last`); else None, as for runs.
        joined_axes: the mesh axes whose ranks hold different elements: reductions go over these.
        copied_axes: the mesh axes whose ranks hold the same elements.
        is_of_vectors: the tensor is a flat parameter over tensor parallelism.
        counted: the extents of this rank's run that a reduction counts on this rank. None: it counts all elements.
            Only a flat parameter over tensor parallelism has elements that another rank counts.
    """

    __slots__ = (
        "__weakref__", "by_dtype", "copied_axes", "counted", "for_torch", "is_of_vectors", "joined_axes", "mesh",
        "numel", "placements", "shape", "strides", "value_specs",
    )  # fmt: skip

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape, strides: tuple[int, ...] | None = None
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.numel = prod(shape)
        is_in_order = strides is None or strides == torch.empty(shape, device="meta").stride()
        self.strides = None if is_in_order else strides
        many = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self.joined_axes = tuple(axis for axis in many if not placements[axis].is_replicate())
        self.copied_axes = tuple(axis for axis in many if placements[axis].is_replicate())
        self.is_of_vectors = False
        self.counted: tuple[Extent, ...] | None = None
        self.by_dtype: dict[torch.dtype, DTensorSpec] = {}
        self.for_torch: dict[torch.dtype, DTensorSpec] = {}
        self.value_specs: dict[tuple[torch.Size, torch.dtype], DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Places:
        return self

    @property
    def device(self) -> torch.device:
        """The device of a result on a rank that computed no part of it."""
        return device_of(self.mesh)

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups whose ranks hold different elements: a reduction of the tensor goes over all of them."""
        return tuple(self.mesh.get_group(axis) for axis in self.joined_axes)

    @property
    def chunk_sizes(self) -> list[set[int]]:
        """The sizes of all ranks' chunks in each dim; 0 is among them if a rank has no elements."""
        sizes = [{size} for size in self.shape]
        for axis, placement in enumerate(self.placements):
            dim: int | None = getattr(placement, "dim", None)
            if dim is not None:
                sizes[dim] = {each.numel for size in sizes[dim] for each in chunks(size, self.mesh.size(axis))}
        return sizes

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the spec of a tensor of `dtype` with these places; the same object each time."""
        spec = self.by_dtype.get(dtype)
        if spec is None:
            spec = self._new_spec(dtype)
            self.keep_with(spec)
        return spec

    def spec_for_torch(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the spec for a DTensor of torch, which hands its spec on to results and files: one without places."""
        spec = self.for_torch.get(dtype)
        if spec is None:
            spec = self.for_torch[dtype] = self._new_spec(dtype)
        return spec

    def _new_spec(self, dtype: torch.dtype) -> DTensorSpec:
        return dtensor_spec(self.mesh, self.placements, torch.Size(self.shape), dtype, self.strides)

    def keep_with(self, spec: DTensorSpec) -> None:
        """Keep these places with `spec`, which describes them. Every operation on the tensor reads them from it."""
        assert spec.tensor_meta is not None, "a DTensor's spec has it"
        self.by_dtype.setdefault(spec.tensor_meta.dtype, spec)
        spec.sherd_places = self

    def same_as(self, other: Places) -> bool:
        """Returns True if both tensors have the same elements on the same ranks."""
        return self is other or (
            self.placements == other.placements and self.shape == other.shape and self.mesh == other.mesh
        )

    def __str__(self) -> str:
        return str(self.placements)


class RaggedShard(UnevenShard):
    """The placement of a tensor of one shape on a mesh axis over which the tensor is cut into runs.

    It is the ragged shard of veScale-FSDP and Megatron-FSDP.

    `stride`: how far apart two neighbours on this axis are in the cut, 1 for a tensor that is cut over one axis. Over
    two axes `cut` numbers the ranks of both, and a rank holds run number `sum(coordinate * stride)`:

        mesh (outer 2, inner 3): outer has stride 1, inner has stride 2        inner 0   inner 1   inner 2
                                                                      outer 0 |   0    |    2    |    4    |
                                                                      outer 1 |   1    |    3    |    5    |

    If other mesh axes shard the tensor too (tensor parallel), `cut` cuts this rank's part of the tensor; ranks at other
    coordinates on those axes may have another cut.

    torch takes the placement for `Shard(0)` wherever it only looks: checkpoints find the tensor sharded. It does not
    equal `Shard(0)`, so `DTensorSpec` refuses it: the dispatch of torch's own DTensors would take a ragged shard for an
    even one. `sherd._torch.dtensor_spec` puts it into a spec that was made with `stands_for`.
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
                "another of this layout: made = torch.empty_like(it), and then made.to_local().copy_(local)"
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
    """Returns the spec of a ragged tensor, for `ragged_dtensor` and `distribute_ragged`.

        one axis              mesh (dp,)             axes (0,)      placements (Replicate(),)
        replicas              mesh (replicate, dp)   axes (1,)      placements (Replicate(), Replicate())
        over TP               mesh (dp, tp)          axes (0,)      placements (Replicate(), Shard(1))
        over two axes         mesh (outer, inner)    axes (1, 0)    placements (Replicate(), Replicate())
        both                  mesh (outer, inner, tp)    axes (1, 0)    placements (Replicate(), Replicate(), Shard(0))

    Args:
        mesh: all axes that the tensor is placed on.
        placements: the tensor's placements before it is cut, one for each axis of `mesh`: `Replicate()` on `axes`;
            `Replicate()` or `Shard(dim)`, of any size, on the others.
        shape: the shape of the unsharded tensor.
        dtype: the dtype of its elements.
        cut: the cut of the tensor-parallel shard, which is the full tensor if the other axes shard nothing.
            `cut.shape` is its shape, `cut.num_ranks` the product of the sizes of `axes`. Ranks with the same
            coordinates on the other axes have the same cut.
        axes: the mesh axes the tensor is cut over, the slowest first. This rank holds run `virtual_rank(mesh, axes)`.

    Raises:
        PlacementError: `cut` is for another shape or number of ranks, a placement is missing or of no known kind, or
            this rank is not in the mesh.
    """
    axes, given = tuple(axes), tuple(placements)
    if len(given) != mesh.ndim:
        raise PlacementError(f"placements {given} on {mesh}: give one for each of its {mesh.ndim} axes")
    if not axes or any(not given[axis].is_replicate() for axis in axes):
        raise PlacementError(
            f"placements {given} on axes {axes} of {mesh}: a tensor is cut into runs over at least one axis, on which "
            "it was replicated before; give Replicate() on that axis"
        )
    strides = {axis: prod(mesh.size(other) for other in axes[at + 1 :]) for at, axis in enumerate(axes)}
    full = tuple(RaggedShard(cut, strides[axis]) if axis in strides else each for axis, each in enumerate(given))
    return Layout(mesh, full, tuple(shape)).spec(dtype)


def virtual_rank(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """Returns this rank's number on `axes`, the slowest first: the number of its run."""
    rank = 0
    for axis in axes:
        rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """A mesh axis with `Shard(dim)` or `VectorShard`, next to those of the runs.

    `extents` are the indices of `dim` that each rank of the axis has, counted within the part that the axes to the left
    leave. This rank has `extents[rank]`.
    """

    axis: int
    dim: int
    extents: tuple[Extent, ...]
    rank: int


class Layout(Places):
    """The places of one ragged tensor's shards, seen from this rank.

    Attributes:
        ragged: the ragged placements by mesh axis; all have the same `cut`.
        splits: the mesh axes with `Shard(dim)`, which cut the tensor before the runs do.
        offsets: the first index, in each dim, of the part that the splits leave to this rank. `cut.shape` is its shape.
        axes: the mesh axes whose ranks hold the runs of this part, the fastest first.
        rank: this rank's number on `axes`.
        owner: the rank on `axes` that holds the tensor unsharded, in its own shape. None: no rank does.
    """

    __slots__ = ("axes", "cut", "local_shape", "offsets", "owner", "ragged", "rank", "splits")

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape) -> None:
        super().__init__(mesh, placements, shape)
        self.ragged, sharded = _by_axis(placements)
        self.cut = next(iter(self.ragged.values())).cut
        coordinate = mesh.get_coordinate()
        self.axes = self._axes_of_runs(coordinate)
        assert coordinate is not None, "`_axes_of_runs` refuses a rank outside the mesh"
        vectors = {axis: each for axis, each in sharded.items() if isinstance(each, VectorShard)}
        self.is_of_vectors = bool(vectors)
        self.splits, self.offsets = self._splits_before_runs(sharded, vectors, coordinate)
        self.rank: int = sum(coordinate[axis] * self.ragged[axis].stride for axis in self.axes)
        self.local_shape = self.cut.local_shape(self.rank)
        self.counted = counted(vectors, self.cut.piece(self.rank), coordinate)
        self.owner = None if any(axis in self.joined_axes for axis in sharded) else _owner(self.cut)

    def _axes_of_runs(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
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
    ) -> tuple[tuple[AxisSplit, ...], Shape]:
        """Returns the axes that shard the tensor on a dim, from left to right, and the offsets of this rank's part.

        The placements in `vectors` say how many elements each rank has; the others cut evenly.

        Raises:
            PlacementError: the part that the axes leave to this rank has another shape than the cut.
        """
        mesh, shape = self.mesh, self.shape
        splits: list[AxisSplit] = []
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, placement in sharded.items():
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise PlacementError(
                    f"placements {self.placements}: a tensor of shape {shape} has no dim {dim} to shard"
                )
            extents = vectors[axis].extents if axis in vectors else chunks(sizes[dim], mesh.size(axis))
            splits.append(AxisSplit(axis, dim, extents, coordinate[axis]))
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
        """The placements once the runs are gathered: torch's own, except for a flat parameter with tensor axes."""
        return tuple(Replicate() if axis in self.ragged else each for axis, each in enumerate(self.placements))

    def owned_cut(self, shape: Shape) -> Runs:
        """Returns the cut of a tensor of `shape` that is unsharded at the owner of this one."""
        assert self.owner is not None, "only layouts with an owner are asked"
        return Runs(shape, self.cut.num_ranks, self.owner, (prod(shape),), by_rows=bool(shape))

    def like(self, cut: Runs) -> Layout:
        """Returns the layout of a tensor with another cut over the same axes: of this part, or of one at the owner."""
        if cut == self.cut:
            return self
        if cut.shape == self.cut.shape:
            return self.recut(cut, self.shape, self.placements)
        # Where there is an owner, the other axes shard nothing: a `Shard(dim)` is on an axis of one rank.
        assert self.owner is not None, "the part has one shape"
        return self.recut(cut, cut.shape, (Replicate(),) * self.mesh.ndim)

    def recut(self, cut: Runs, shape: Shape, others: tuple[Placement, ...]) -> Layout:
        """Returns the layout of a tensor of `shape` cut over the same axes, with the placements `others` elsewhere."""
        ragged = {axis: RaggedShard(cut, placement.stride) for axis, placement in self.ragged.items()}
        return Layout(self.mesh, tuple(ragged.get(axis, each) for axis, each in enumerate(others)), shape)

    def shares_ranks_with(self, other: Layout) -> bool:
        """Returns True if every shard is on the same rank as the shard of `other` with the same number."""
        return (
            self.axes == other.axes
            and (self.mesh is other.mesh or self.mesh == other.mesh)
            and all(self.ragged[axis].stride == other.ragged[axis].stride for axis in self.axes)
        )

    def __str__(self) -> str:
        return str(self.placements) if len(self.axes) > 1 or self.splits else str(self.ragged[self.axes[0]])


def _by_axis(placements: tuple[Placement, ...]) -> tuple[dict[int, RaggedShard], dict[int, Shard]]:
    """Returns the ragged placements, and those that shard a dim, by mesh axis. All other axes have copies.

    Raises:
        PlacementError: no placement is ragged, two have different cuts, or one is of no known kind.
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
    """Returns the rank that holds the tensor unsharded, in its own shape, and so can do any operation alone."""
    if cut.shape and not cut.by_rows:
        return None
    holders = [rank for rank in cut.holders if cut.local_numel(rank)]
    return cut.first if not holders else holders[0] if len(holders) == 1 else None


def layout_of(spec: DTensorSpec) -> Layout:
    """Returns the layout that the spec of a ragged tensor describes.

    Raises:
        PlacementError: no ragged tensor can have this spec.
    """
    layout: Layout | None = spec.__dict__.get("sherd_places")
    if layout is None:
        layout = Layout(spec.mesh, spec.placements, tuple(spec.shape))
        layout.keep_with(spec)
    return layout


def places_of(spec: DTensorSpec) -> Places:
    """Returns the places that the spec of a sharded tensor describes, of runs or of equal chunks."""
    places: Places | None = spec.__dict__.get("sherd_places")
    if places is None:
        if has_ragged(spec.placements):
            return layout_of(spec)
        # torch hands its specs on, also to files: places of chunks are not kept with a spec of torch.
        key = id(spec.mesh), spec.placements, spec.shape, spec.stride
        places = _alike.get(key)
        if places is None:
            places = _alike[key] = Places(spec.mesh, spec.placements, tuple(spec.shape), spec.stride)
    return places


# Tensors with equal places share one object, so that two lists of tensors are compared without a look at each
# placement. The object keeps its mesh alive, so that no other mesh gets the id in the key.
_alike: weakref.WeakValueDictionary[object, Places] = weakref.WeakValueDictionary()


def in_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None, "a DTensor's spec knows its dtype"
    return spec if spec.tensor_meta.dtype == dtype else places_of(spec).spec(dtype)


def has_ragged(placements: Sequence[Placement]) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements)


def is_ragged(spec: DTensorSpec) -> bool:
    return has_ragged(spec.placements)
