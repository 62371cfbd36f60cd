"""How the parameters of a new unit will be sharded: where each is cut, and which DTensor its shard will be.

Everything is decided here before anything is moved, so that an error leaves the model as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as ReplicateSpec
from torch.distributed.tensor import Shard as ShardSpec
from torch.distributed.tensor.placement_types import Placement as PlacementSpec

from sherd._torch import DTensorSpec, concatenate_meshes, dtensor_spec, local_tensor, strided_shard
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.engine.group import travels_alone
from sherd.engine.ownership import Found
from sherd.errors import OwnershipError, PlacementError
from sherd.layout.placement import Cut, Placement, Replicate, Shard
from sherd.layout.plan import Wanted, plan
from sherd.layout.runs import RunPlacement, Runs
from sherd.tensor.placement import RaggedShard

AnyPlacement = Placement | RunPlacement


@dataclass(frozen=True, slots=True)
class Form:
    """How one parameter will be sharded: the numbers, both specs, and the tensor to cut."""

    cut: Cut | Runs
    lot: int
    shard_spec: DTensorSpec
    whole_spec: DTensorSpec | None
    data: torch.Tensor


def forms_of(
    found: Sequence[Found], mesh: DataMesh, streams: Streams, placement_of: Callable[[Found], AnyPlacement | None]
) -> list[Form]:
    """How each of `found` is sharded over `mesh`. Placement None is the default: dim 0, or for a scalar a copy on every
    rank.

    Raises:
        PlacementError: a parameter that cannot be cut as asked, or a DTensor that does not fit the mesh.
    """
    placements = [placement_of(each) for each in found]
    planned = _planned(found, mesh, streams, placements)
    forms = []
    for index, (each, placement) in enumerate(zip(found, placements, strict=True)):
        whole_spec = each.parameter._spec if isinstance(each.parameter, DTensor) else None
        data = local_tensor(each.parameter) if isinstance(each.parameter, DTensor) else each.parameter
        if index in planned:
            cut, lot = planned[index]
            forms.append(Form(cut, lot, _ragged_spec(each.parameter, mesh, cut), None, data))
        else:
            forms.append(_cut_by_itself(each, mesh, placement, whole_spec, data))
    return forms


def _cut_by_itself(
    each: Found, mesh: DataMesh, placement: AnyPlacement | None, whole_spec: DTensorSpec | None, data: torch.Tensor
) -> Form:
    shape = tuple(data.shape)
    if placement is None or isinstance(placement, RunPlacement):
        placement = Shard(0) if shape else Replicate()
    cut = placement.cut(shape, mesh.num_shards, each.name)
    if whole_spec is None:
        _require_own_mesh(each, mesh)
        placements = _data_placements(mesh, cut.dim, 1)
        spec = dtensor_spec(mesh.mesh, placements, each.parameter.shape, each.parameter.dtype)
    elif mesh.full is not None:
        spec = _on_full_mesh(whole_spec, mesh, cut.dim, each.name)
    else:
        spec = _beside(whole_spec, mesh, cut.dim, each.name)
    return Form(cut, 0, spec, whole_spec, data)


def _require_own_mesh(each: Found, mesh: DataMesh) -> None:
    """A plain parameter is cut over a mesh that is data parallel only."""
    if mesh.full is not None and mesh.full.ndim > mesh.mesh.ndim:
        raise PlacementError(
            f"{each.name}: dp_mesh_dims names axes of a larger mesh {mesh.full.mesh_dim_names}, so parameters must "
            "be DTensors on that mesh (distribute_module, parallelize_module); this one is a plain tensor"
        )


# Cut into runs

_loads: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()
"""By shard group: the elements that each rank owns of units whose model has not run yet."""


def forget_loads(mesh: DataMesh) -> None:
    """A model over `mesh` is complete: the owners of the next one are chosen as if it were the first."""
    if mesh.shard_group is not None:
        _loads.pop(mesh.shard_group, None)


def _planned(
    found: Sequence[Found], mesh: DataMesh, streams: Streams, placements: Sequence[AnyPlacement | None]
) -> dict[int, tuple[Runs, int]]:
    """The cut of every parameter that is cut into runs, and the number of its lot: those that were planned together."""
    lots: dict[tuple[torch.dtype, bool, bool, int | None], list[int]] = {}
    wanted: dict[int, Wanted] = {}
    for index, (each, placement) in enumerate(zip(found, placements, strict=True)):
        if isinstance(placement, RunPlacement) and mesh.shard_axis is not None:
            _require_plain(each, placement)
            _require_own_mesh(each, mesh)
            parameter = each.parameter
            wanted[index] = Wanted(tuple(parameter.shape), placement, each.name)
            # One that travels alone is cut evenly by itself; where owners balance, all are needed for that.
            alone = index if travels_alone(parameter, streams) and not placement.together else None
            lots.setdefault((parameter.dtype, parameter.requires_grad, placement.owned, alone), []).append(index)
    cuts: dict[int, tuple[Runs, int]] = {}
    for lot, ((_, _, owned, _), members) in enumerate(lots.items()):
        loads = _loads_of(mesh) if owned else None
        for index, cut in zip(members, plan([wanted[each] for each in members], mesh.num_shards, loads), strict=True):
            cuts[index] = cut, lot
            if loads is not None:
                loads[cut.first] += cut.numel
    return cuts


def _loads_of(mesh: DataMesh) -> list[int]:
    assert mesh.shard_group is not None, "parameters are cut over a shard axis"
    return _loads.setdefault(mesh.shard_group, [0] * mesh.num_shards)


def _require_plain(each: Found, placement: RunPlacement) -> None:
    if isinstance(each.parameter, DTensor):
        raise PlacementError(
            f"{each.name}: {placement} cuts plain tensors, and this one is a DTensor on {each.parameter.device_mesh}; "
            "use Shard(dim) for parameters that are tensor parallel"
        )
    if hasattr(each.parameter.data, "fsdp_pre_all_gather"):
        raise PlacementError(
            f"{each.name}: a {type(each.parameter.data).__name__} gathers itself and is cut on dim 0 only, not as "
            f"{placement}; let shard_placement_fn return Shard(0) for it"
        )


def _ragged_spec(parameter: nn.Parameter, mesh: DataMesh, cut: Runs) -> DTensorSpec:
    placements: list[PlacementSpec] = [ReplicateSpec()] * mesh.mesh.ndim
    assert mesh.shard_axis is not None, "parameters are cut over a shard axis"
    placements[mesh.shard_axis] = RaggedShard(cut)
    return dtensor_spec(mesh.mesh, tuple(placements), parameter.shape, parameter.dtype)


# Cut on a dim


def _data_placements(mesh: DataMesh, dim: int | None, split: int) -> tuple[PlacementSpec, ...]:
    """Placements on the data-parallel axes; `split` is how many parts other axes to the right cut `dim` into."""
    placements: list[PlacementSpec] = [ReplicateSpec()] * mesh.mesh.ndim
    if dim is not None and mesh.shard_axis is not None:
        placements[mesh.shard_axis] = ShardSpec(dim) if split == 1 else strided_shard(dim, split)
    return tuple(placements)


def _split_of(dim: int | None, placements: tuple[PlacementSpec, ...], mesh: DeviceMesh, after: int = -1) -> int:
    """How many parts the axes of `mesh` behind axis `after` cut `dim` into."""
    split = 1
    for axis, placement in enumerate(placements):
        if axis > after and placement.is_shard(dim) and dim is not None:
            split *= mesh.size(axis)
    return split


def _beside(whole: DTensorSpec, mesh: DataMesh, dim: int | None, name: str) -> DTensorSpec:
    """The shard of a parameter that is a DTensor on another mesh (tensor parallel): data-parallel axes go in front."""
    if whole.mesh == mesh.mesh:
        raise OwnershipError(
            f"{name}: it is a DTensor on the very mesh it would be sharded over, {mesh.mesh}, so something has sharded "
            "it already (a unit that no longer exists?); build the model anew"
        )
    split = _split_of(dim, whole.placements, whole.mesh)
    placements = (*_data_placements(mesh, dim, split), *whole.placements)
    return dtensor_spec(concatenate_meshes([mesh.mesh, whole.mesh]), placements, whole.shape, _dtype(whole))


def _on_full_mesh(whole: DTensorSpec, mesh: DataMesh, dim: int | None, name: str) -> DTensorSpec:
    """The shard of a parameter that is a DTensor on the full mesh whose data-parallel axes the user named."""
    assert mesh.full is not None and mesh.dims is not None, "only named axes come from a full mesh"
    names = mesh.full.mesh_dim_names or ()
    if whole.mesh != mesh.full:
        raise PlacementError(
            f"{name}: it is a DTensor on {whole.mesh}, not on the mesh that fully_shard was given, {mesh.full}"
        )
    for axis_name in (*mesh.dims.shard_names, *mesh.dims.replicate_names):
        placement = whole.placements[names.index(axis_name)]
        if not placement.is_replicate():
            raise PlacementError(
                f"{name}: data-parallel axis {axis_name!r} must find it replicated, its placement there is "
                f"{placement}; distribute it with Replicate() on the data-parallel axes"
            )
    data_axes = {names.index(each) for each in (*mesh.dims.shard_names, *mesh.dims.replicate_names)}
    others = [axis for axis in range(mesh.full.ndim) if axis not in data_axes]
    if len(mesh.dims.shard_names) == 1 and len(mesh.dims.replicate_names) <= 1:
        axis = names.index(mesh.dims.shard_names[0])
        placements = list(whole.placements)
        if dim is not None:
            split = _split_of(dim, whole.placements, mesh.full, after=axis)
            placements[axis] = ShardSpec(dim) if split == 1 else strided_shard(dim, split)
        return dtensor_spec(mesh.full, tuple(placements), whole.shape, _dtype(whole))
    # Several axes were flattened into one: the shard lives on a mesh of that axis and the ones that are left.
    meshes = [mesh.mesh, *(mesh.full[names[axis]] for axis in others)]
    rest = tuple(whole.placements[axis] for axis in others)
    split = 1
    for axis, placement in zip(others, rest, strict=True):
        split *= mesh.full.size(axis) if dim is not None and placement.is_shard(dim) else 1
    placements_all = (*_data_placements(mesh, dim, split), *rest)
    return dtensor_spec(concatenate_meshes(meshes) if others else mesh.mesh, placements_all, whole.shape, _dtype(whole))


def _dtype(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None, "a DTensor's spec knows its dtype"
    return spec.tensor_meta.dtype
