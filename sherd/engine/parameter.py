"""One parameter: what it is as a shard, what it is as a whole, and the places in the modules where it hangs.

A Parameter object is replaced once, when it is sharded: the shard (a DTensor) is what the module shows and the
optimizer owns; the whole one is shown during forward and backward only. The replaced object knows its successor.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as ReplicateSpec
from torch.distributed.tensor import Shard as ShardSpec
from torch.distributed.tensor.placement_types import Placement as PlacementSpec

from sherd._torch import DTensorSpec, concatenate_meshes, dtensor_spec, local_tensor, strided_shard
from sherd.comm.mesh import DataMesh
from sherd.errors import OwnershipError, PlacementError
from sherd.layout.placement import Cut, Replicate, Shard

_records: dict[int, tuple[weakref.ref[ShardedParameter], weakref.ref[torch.Tensor] | None]] = {}
"""By the id of a tensor: its record, and the tensor itself where the record does not hold it.

Nothing is written on tensors: it would travel into copies and files. And no weak reference is taken to a shard, for
torch refuses to swap a tensor that has one (`module.to()`); a shard is known by being its record's.
"""


def record_of(tensor: torch.Tensor) -> ShardedParameter | None:
    """The record of a shard, of a whole parameter, or of the Parameter that was sharded; None for any other tensor."""
    entry = _records.get(id(tensor))
    if entry is None:
        return None
    record, held = entry[0](), entry[1]
    if record is None or tensor is not (record.shard if held is None else held()):
        return None
    return record


def _forget(key: int, died: Any) -> None:
    """Drop the entry that `died`, a weak reference, is part of; the id may have gone to another tensor since."""
    if any(died is each for each in _records.get(key, ())):
        _records.pop(key, None)


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute of a module that holds the parameter. The dict is the module's own, so no module is kept alive."""

    parameters: dict[str, nn.Parameter | None]
    attribute: str

    def is_at(self, module: nn.Module, attribute: str) -> bool:
        """Whether this is that attribute of that module."""
        return self.parameters is module._parameters and self.attribute == attribute

    def show(self, parameter: nn.Parameter) -> None:
        # Past nn.Module.__setattr__, which would cost ten times as much, four times a step.
        self.parameters[self.attribute] = parameter


class Owner(Protocol):
    """What a parameter needs to know of its unit."""

    id: int

    def shards_written(self) -> None:
        """Shards have new values: whole parameters made from the old ones are stale."""


@dataclass(eq=False)
class ShardedParameter:
    """The record of one parameter.

    `shape` and `dtype` are the whole's (the local tensor's, under tensor parallelism). `shard_spec` and `whole_spec`
    say which DTensor each form is; `whole_spec` is None for a plain tensor. `holder` is the module it was found on.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    cut: Cut
    shard_spec: DTensorSpec
    whole_spec: DTensorSpec | None
    shard: nn.Parameter
    holder: weakref.ref[nn.Module]
    places: list[Place] = field(default_factory=list)
    _owner: weakref.ref[Owner] | None = None

    def claim(self, tensor: torch.Tensor) -> None:
        """Remember that `tensor` is a form of this parameter: its shard, its whole, or what it was before."""
        key = id(tensor)
        forget = functools.partial(_forget, key)
        held = None if tensor is self.shard else weakref.ref(tensor, forget)
        _records[key] = (weakref.ref(self, forget), held)

    def belong_to(self, owner: Owner) -> None:
        """Be owned by a unit, which is told when the shard is written."""
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        """The unit it belongs to, if that still exists."""
        return None if self._owner is None else self._owner()

    def exchange(self, shard: nn.Parameter) -> None:
        """Take another DTensor of the same layout as the shard; the old one has it as its successor."""
        before, self.shard = self.shard, shard
        self.claim(before)
        self.claim(shard)
        self.show(shard)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard as a plain tensor, `cut.local_shape(rank)`."""
        assert isinstance(self.shard, DTensor), f"{self.name}: a shard is a DTensor"
        return local_tensor(self.shard)

    def show(self, parameter: nn.Parameter) -> None:
        """Hang `parameter`, a form of this one, on every place."""
        for place in self.places:
            place.show(parameter)


@dataclass(frozen=True, slots=True)
class Form:
    """How one parameter will be sharded: the numbers, both specs, and the tensor to cut."""

    cut: Cut
    shard_spec: DTensorSpec
    whole_spec: DTensorSpec | None
    data: torch.Tensor


def form_of(parameter: nn.Parameter, mesh: DataMesh, dim: int | None, name: str) -> Form:
    """How `parameter` is sharded over `mesh`; `dim` None means the default, dim 0, or a copy on every rank for a
    scalar.

    Raises:
        PlacementError: there is no such dim, or the parameter is a DTensor that does not fit the mesh.
    """
    whole_spec = parameter._spec if isinstance(parameter, DTensor) else None
    data = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    shape = tuple(data.shape)
    placement = Shard(0 if dim is None else dim) if shape or dim is not None else Replicate()
    cut = placement.cut(shape, mesh.num_shards, name)
    if whole_spec is None:
        if mesh.full is not None and mesh.full.ndim > mesh.mesh.ndim:
            raise PlacementError(
                f"{name}: dp_mesh_dims names axes of a larger mesh {mesh.full.mesh_dim_names}, so parameters must be "
                "DTensors on that mesh (distribute_module, parallelize_module); this one is a plain tensor"
            )
        spec = dtensor_spec(mesh.mesh, _data_placements(mesh, cut.dim, 1), parameter.shape, parameter.dtype)
    elif mesh.full is not None:
        spec = _on_full_mesh(whole_spec, mesh, cut.dim, name)
    else:
        spec = _beside(whole_spec, mesh, cut.dim, name)
    return Form(cut, spec, whole_spec, data)


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
