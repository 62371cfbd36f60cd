"""Plain parameters with types of the package spmd_types, which say their placements on all axes but data parallelism.

    type on an axis | the parameter on it        | its gradient on it
    R               | the same on all ranks      | a sum that is still to be made
    I               | the same on all ranks      | the same on all ranks
    S(dim)          | cut along `dim`            | cut alike

Such a parameter is stored as a DTensor on the full mesh. Modules compute with its local tensor, which has the types
again. The package is the user's: a parameter with types shows that it is loaded, and nothing here imports it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as PartialSpec
from torch.distributed.tensor import Replicate as ReplicateSpec
from torch.distributed.tensor import Shard as ShardSpec
from torch.distributed.tensor.placement_types import Placement as PlacementSpec

from sherd._torch import DTensorSpec, all_gather_single, dtensor, dtensor_spec
from sherd.comm.mesh import DataMesh
from sherd.errors import PlacementError
from sherd.layout.extent import chunks

P = ParamSpec("P")
R = TypeVar("R")


class Axis(Protocol):
    """A `MeshAxis` of the package, which knows its ranks and no name."""

    def size(self) -> int:
        """The number of ranks."""

    def __le__(self, other: Axis) -> bool:
        """Whether the ranks are some of `other`'s."""


Types = Mapping[Axis, object]


@dataclass(frozen=True, slots=True)
class SpmdTypes:
    """The types of one parameter, and what they mean on the full mesh.

    Attributes:
        spec: the layout of the parameter as a DTensor.
        gradient: the placements of the gradient that autograd brings.
        local: the types as the package keeps them, on the axes of the user's own mesh.
        partition: the axes that cut each dim (`PartitionSpec`), if any.
    """

    spec: DTensorSpec
    gradient: tuple[PlacementSpec, ...]
    local: Types
    partition: object

    def annotate(self, tensor: torch.Tensor) -> None:
        sys.modules["spmd_types"].assert_type(tensor, self.local, partition_spec=self.partition)

    def on_mesh(self, gradient: torch.Tensor) -> DTensor:
        """Returns `gradient`, of the local tensor, as a DTensor, which is still a sum on axes with R."""
        return dtensor(gradient, dtensor_spec(self.spec.mesh, self.gradient, self.spec.shape, gradient.dtype))


def spmd_types_of(parameter: torch.Tensor, mesh: DataMesh, name: str) -> SpmdTypes | None:
    """Returns the types of `parameter`, which is to be sharded over `mesh`; None if it has none.

    Collective over the axes that cut it, whose ranks tell how much of it they have.

    Raises:
        PlacementError: the types are not those of one tensor that is replicated over the data-parallel axes of a full
            mesh, and has a placement of DTensor on all others.
    """
    local: Types = {} if isinstance(parameter, DTensor) else getattr(parameter, "_local_type", {})
    if not local:
        return None
    if mesh.full is None or mesh.dims is None:
        raise PlacementError(
            f"{name}: it is a plain tensor with types of spmd_types, {dict(local)}, of which the mesh {mesh.mesh} says "
            "nothing; give fully_shard the full mesh, with names, and "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        )
    spmd, full = sys.modules["spmd_types"], mesh.full
    axes = {axis_name: spmd.MeshAxis.of(full.get_group(axis_name)) for axis_name in full.mesh_dim_names or ()}
    data_names = (*mesh.dims.shard_names, *mesh.dims.replicate_names)
    partition = spmd.get_partition_spec(parameter)
    cuts = _cuts(partition or (), list(axes.values()), name)
    others = {axis: axis_name for axis_name, axis in axes.items() if axis_name not in data_names and axis.size() > 1}
    _require_whole(spmd, local, cuts, others, _span(spmd, (axes[each] for each in data_names)), name)
    placements: list[PlacementSpec] = [ReplicateSpec() for _ in axes]
    gradient: list[PlacementSpec] = [PartialSpec() if each in data_names else ReplicateSpec() for each in axes]
    for at, axis in enumerate(axes.values()):
        if axis in cuts:
            placements[at] = gradient[at] = ShardSpec(cuts[axis])
        elif axis in others and local[axis] is spmd.R:
            gradient[at] = PartialSpec()
    shape = _whole_shape(parameter.shape, full, placements, mesh.device, name)
    spec = dtensor_spec(full, tuple(placements), shape, parameter.dtype)
    own = {axis: local.get(axis, spmd.R) for axis in _own_axes(spmd, local, axes, name)}
    return SpmdTypes(spec, tuple(gradient), own, partition)


def untyped(attributes: Mapping[str, object]) -> dict[str, object]:
    """Returns what users have written on a parameter, without its types, which no DTensor has and no file should."""
    return {name: value for name, value in attributes.items() if name not in ("_local_type", "_partition_spec")}


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, around which the package checks no types: the engine's tensors and collectives have none."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        spmd = sys.modules.get("spmd_types")
        with nullcontext() if spmd is None else spmd.no_typecheck():
            return function(*args, **kwargs)

    return run


def _cuts(partition: Iterable[Axis | tuple[Axis, ...] | None], axes: list[Axis], name: str) -> dict[Axis, int]:
    """Returns the dim that each axis cuts, of those that cut one."""
    cuts: dict[Axis, int] = {}
    for dim, entry in enumerate(partition):
        cutting = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        known = [axes.index(axis) for axis in cutting if axis in axes]
        if known != sorted(known):
            raise PlacementError(
                f"{name}: dim {dim} is cut over the axes {entry} in this order, and the mesh has them in another one; "
                "a DTensor reads a mesh from left to right: give the mesh the axes in the order in which they cut"
            )
        cuts |= dict.fromkeys(cutting, dim)
    return cuts


def _require_whole(
    spmd: ModuleType, types: Types, cuts: Mapping[Axis, int], others: Mapping[Axis, str], data: Axis | None, name: str
) -> None:
    """Raise unless the types say R on all data-parallel axes, and something that DTensor knows on each of `others`."""
    for axis, found in types.items():
        if axis in others:
            if found not in (spmd.R, spmd.I) and axis not in cuts:
                raise PlacementError(
                    f"{name}: its type on axis {others[axis]!r} is {found!r}, which says not what each rank holds of "
                    "one tensor; type it R, I or S(dim) on that axis, or convert it, and then fully_shard"
                )
        elif data is None or not axis <= data:
            raise PlacementError(
                f"{name}: it has the type {found!r} on axis {axis}, which is neither an axis of the mesh that "
                f"fully_shard was given, except for data parallelism {tuple(others.values())}, nor a part of the "
                "data-parallel axes; type it on axes of that mesh"
            )
        elif found is not spmd.R:
            raise PlacementError(
                f"{name}: its type on the data-parallel axis {axis} is {found!r}; it must be R, because fully_shard "
                "sums its gradient over that axis"
            )
    untyped = [axis_name for axis, axis_name in others.items() if axis not in types]
    if untyped:
        raise PlacementError(
            f"{name}: it has no type on the axes {untyped} of the mesh, only {dict(types)}; "
            "spmd_types.assert_type it on those, too"
        )


def _span(spmd: ModuleType, axes: Iterable[Axis]) -> Axis | None:
    """Returns the axis of all ranks that `axes` span together; None for this rank alone."""
    wide = spmd.normalize_mesh(frozenset(axes))
    span: Axis | None = sys.modules["spmd_types._mesh_axis"].flatten_axes(tuple(wide)) if wide else None
    return span


def _own_axes(spmd: ModuleType, local: Types, axes: Mapping[str, Axis], name: str) -> Iterable[Axis]:
    """Returns the axes of the mesh that the user's types are on: all that have a type, or else the current mesh."""
    candidates: tuple[Iterable[Axis], ...] = (local, spmd.current_mesh() or ())
    for own in candidates:
        if local.keys() <= set(own) and _span(spmd, own) == _span(spmd, axes.values()):
            return own
    raise PlacementError(
        f"{name}: its types are on the axes {list(local)} alone, so nothing says which axes it has in forward; type it "
        f"on all of {list(axes)}, or call fully_shard inside spmd_types.set_current_mesh(...), a mesh of those ranks"
    )


def _whole_shape(
    local: torch.Size, mesh: DeviceMesh, placements: list[PlacementSpec], device: torch.device, name: str
) -> torch.Size:
    """Returns the shape of the tensor of which each rank of `mesh` has a part of shape `local`."""
    shape = list(local)
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, ShardSpec):
            continue
        size = shape[placement.dim]
        sizes = torch.full((mesh.size(axis),), size, device=device)
        all_gather_single(sizes, torch.tensor([size], device=device), group=mesh.get_group(axis))
        shape[placement.dim] = total = int(sizes.sum().item())
        if sizes.tolist() != [each.numel for each in chunks(total, mesh.size(axis))]:
            raise PlacementError(
                f"{name}: dim {placement.dim} is cut over axis {axis} of the mesh into parts of {sizes.tolist()}; a "
                f"DTensor of {total} has {[each.numel for each in chunks(total, mesh.size(axis))]}: cut it as "
                "torch.chunk does"
            )
    return torch.Size(shape)
