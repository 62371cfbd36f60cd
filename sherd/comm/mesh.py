"""Which ranks shard a parameter and which hold copies of it: the data-parallel part of a device mesh."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd._torch import concatenate_meshes, device_of, flatten_mesh
from sherd.comm.transport import Still, Transport
from sherd.comm.transports import check_transport, transport_of
from sherd.errors import MeshError
from sherd.policy import CommPolicy, DataParallelMeshDims


class DataMesh:
    """The data-parallel axes: parameters are sharded over `shard`, and each shard is replicated over `replicate`.

    `full` is the larger mesh the axes were picked from, when the user named them with `dp_mesh_dims`. Transports are
    made when they are first asked for, which all ranks of an axis do at the same moment.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        shard_axis: int | None,
        replicate_axis: int | None,
        full: DeviceMesh | None = None,
        dims: DataParallelMeshDims | None = None,
        comm: CommPolicy = CommPolicy(),
    ) -> None:
        if mesh.get_coordinate() is None:
            raise MeshError(
                f"rank {dist.get_rank()} is not in the mesh {mesh}; call fully_shard only on ranks the mesh names"
            )
        self.mesh = mesh
        self.shard_axis = shard_axis
        self.replicate_axis = replicate_axis
        self.full = full
        self.dims = dims
        self.comm = comm
        self.shard_group = None if shard_axis is None else mesh.get_group(shard_axis)
        self.replicate_group = None if replicate_axis is None else mesh.get_group(replicate_axis)
        self.num_shards = 1 if shard_axis is None else mesh.size(shard_axis)
        self.num_replicas = 1 if replicate_axis is None else mesh.size(replicate_axis)
        self.shard_rank = 0 if shard_axis is None else mesh.get_local_rank(shard_axis)
        self._extra: dict[int, dist.ProcessGroup] = {}
        for group in (self.shard_group, self.replicate_group):
            check_transport(group, self.device, comm)

    @property
    def device(self) -> torch.device:
        """Where whole parameters live on this rank."""
        return device_of(self.mesh)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis alone, as a 1-D mesh."""
        if self.mesh.ndim == 1 or self.shard_axis is None:
            return self.mesh
        names = self.mesh.mesh_dim_names
        assert names is not None, "a 2-D mesh has names, or it was refused"
        return self.mesh[names[self.shard_axis]]

    @property
    def shard_ranks(self) -> list[int]:
        """Global ranks of the shard axis, in order."""
        assert self.shard_group is not None, "asked for the ranks of an axis that this mesh does not have"
        return dist.get_process_group_ranks(self.shard_group)

    @property
    def shard_transport(self) -> Transport:
        """What moves bytes along the shard axis."""
        return self.transport_of(self.shard_group)

    @property
    def gather_transport(self) -> Transport:
        """What gathers parameters along the shard axis."""
        return _STILL if self.comm.fake_all_gather else self.shard_transport

    def reduce_transport(self, group: dist.ProcessGroup | None) -> Transport:
        """What reduces gradients between the ranks of `group`, one of this mesh's over the shard axis."""
        return _STILL if self.comm.fake_reduce else self.transport_of(group)

    @property
    def replicate_transport(self) -> Transport:
        """What moves bytes along the replicate axis, which only gradients do."""
        return self.reduce_transport(self.replicate_group)

    def transport_of(self, group: dist.ProcessGroup | None) -> Transport:
        """What moves bytes between the ranks of `group`, one of this mesh's; None stands for this rank alone."""
        return transport_of(group, self.device, self.comm)

    def smaller_group(self, size: int) -> dist.ProcessGroup:
        """The `size` neighbouring ranks of the shard axis that this rank belongs to; made once, collectively."""
        first = self.shard_rank // size * size
        return self._extra_group(size, self.shard_ranks[first : first + size])

    def reduction_group(self) -> dist.ProcessGroup:
        """A second group over the shard axis, for reduce-scatters beside all-gathers; made once, collectively."""
        return self._extra_group(_FOR_REDUCTION, self.shard_ranks)

    def _extra_group(self, purpose: int, ranks: list[int]) -> dist.ProcessGroup:
        if purpose not in self._extra:
            key = (id(self.shard_group), purpose)
            known = _extra_groups.get(key)
            self._extra[purpose] = _extra_groups[key] = known if known is not None else _new_group(ranks)
        return self._extra[purpose]


_FOR_REDUCTION = 0
_STILL = Still()

# Units that shard over one group share its extra groups. Weak, and each holder also holds the group whose id is the
# key.
_extra_groups: weakref.WeakValueDictionary[tuple[int, int], dist.ProcessGroup] = weakref.WeakValueDictionary()


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    # Only the members meet: the ranks of other rows of the mesh make their own group at the same moment.
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "a rank makes only groups it belongs to"
    return group


def data_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, comm: CommPolicy = CommPolicy()) -> DataMesh:
    """Read a user's mesh: 1-D shards, 2-D replicates over axis 0 and shards over axis 1, `dims` picks axes by name.

    Without a mesh it is one axis over all ranks of the default process group, on the device of its backend.

    Raises:
        MeshError: another number of axes, a 2-D mesh without names, or a name that the mesh does not have.
    """
    mesh = mesh if mesh is not None else _default_mesh()
    return _read(mesh, comm) if dims is None else _pick(mesh, dims, comm)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(default_device_type(), (dist.get_world_size(),))


def default_device_type(group: dist.ProcessGroup | None = None) -> str:
    """The accelerator if the group (None: the default one) can reach it, else the CPU: a gloo-only group on a machine
    with GPUs is CPU."""
    backend = str(dist.get_backend(group))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or backend == "gloo":
        return "cpu"
    return accelerator.type


_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, str], DeviceMesh]] = weakref.WeakKeyDictionary()
"""Of each shard group, by its replicate group's id: groups are compared by identity, and so then are their meshes."""


def mesh_of_groups(
    shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None, device_type: str, comm: CommPolicy = CommPolicy()
) -> DataMesh:
    """A mesh of process groups that a user has made: parameters are sharded over one, copies are kept over the other.

    Collective over `replicate`, the first time it is given with `shard`.

    Raises:
        MeshError: the two groups are not the row and the column of one grid of ranks.
    """
    known = _meshes.setdefault(shard, {})
    key = (id(replicate), device_type)
    if key not in known:
        known[key] = _mesh_of(shard, replicate, device_type)
    if replicate is None:
        return DataMesh(known[key], shard_axis=0, replicate_axis=None, comm=comm)
    return DataMesh(known[key], shard_axis=1, replicate_axis=0, comm=comm)


def _mesh_of(shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None, device_type: str) -> DeviceMesh:
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type)
    row = dist.get_process_group_ranks(shard)
    rows: list[list[int]] = [[]] * dist.get_world_size(replicate)
    dist.all_gather_object(rows, row, group=replicate)
    column = dist.get_process_group_ranks(replicate)
    at = row.index(dist.get_rank())
    if len({len(each) for each in rows}) > 1 or [each[at] for each in rows] != column:
        raise MeshError(
            f"the shard groups {rows} and the replicate group {column} are not rows and a column of one grid; give "
            "rank r of every shard group the replicate group of all ranks r"
        )
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )


def one_rank_group() -> dist.ProcessGroup:
    """A group of this rank alone; the same one each time."""
    default = dist.group.WORLD
    assert isinstance(default, dist.ProcessGroup), "the default group was initialized"
    if default not in _alone:
        _alone[default] = _new_group([dist.get_rank()])
    return _alone[default]


_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _read(mesh: DeviceMesh, comm: CommPolicy) -> DataMesh:
    if mesh.ndim == 1:
        return DataMesh(mesh, shard_axis=0, replicate_axis=None, comm=comm)
    if mesh.ndim != 2:
        raise MeshError(
            f"fully_shard expects a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {mesh.ndim} axes: {mesh}; "
            "for a larger mesh pass dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        )
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"a 2-D mesh needs names, to tell its replicate axis from its shard axis: {mesh}; pass "
            "mesh_dim_names=('replicate', 'shard') to init_device_mesh"
        )
    return DataMesh(mesh, shard_axis=1, replicate_axis=0, comm=comm)


def _pick(mesh: DeviceMesh, dims: DataParallelMeshDims, comm: CommPolicy) -> DataMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(f"dp_mesh_dims picks axes by name, but the mesh has none: {mesh}; give it mesh_dim_names")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise MeshError(f"dp_mesh_dims names axis {name!r}, which the mesh does not have; its axes are {names}")
    shard = _axis(mesh, dims.shard_names)
    replicate = _axis(mesh, dims.replicate_names)
    if shard is not None and replicate is not None:
        return DataMesh(concatenate_meshes([replicate, shard]), 1, 0, mesh, dims, comm)
    if shard is not None:
        return DataMesh(shard, 0, None, mesh, dims, comm)
    assert replicate is not None, "DataParallelMeshDims holds at least one name"
    return DataMesh(replicate, None, 0, mesh, dims, comm)


def _axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The named axes as one axis."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))
