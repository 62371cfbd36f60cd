"""The data-parallel part of a device mesh: which ranks shard a parameter, and which hold copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd._torch import concatenate_meshes, device_of, flatten_mesh, keeps_root_order
from sherd.comm.groups import default_group, group_beside, group_of, meshes_of, require_alive
from sherd.comm.objects import all_gather_objects
from sherd.comm.transport import NoTransport, Transport
from sherd.comm.transports import check_transport, transport_of
from sherd.errors import MeshError
from sherd.policy import Codec, CommPolicy, DataParallelMeshDims, Level, Reduction

if TYPE_CHECKING:
    from sherd.comm.owner_sums import SumsInOrder
    from sherd.comm.wire_errors import WireErrors

ONE_RANK = "alone"
"""The name of an axis of this rank alone, in a mesh whose other axes are not data parallel."""


class DataMesh:
    """The data-parallel axes: parameters are sharded over `shard`, and each shard is replicated over `replicate`.

    With `shards_replicas` each replica owns only one part of the shard, steps that part, and fetches the other parts
    before use. A parameter is cut into `num_pieces` such parts, of which this rank owns number `piece`. The parts of
    one shard are consecutive. 2 replicas of 2 shards:

        shard      | 0         | 1         |
        part       | 0   | 1   | 2   | 3   |
        replica      0     1     0     1

    With `keeps_unsharded` gathered parameters are not freed, but updated after their shards were written.

    `full` is the larger mesh from which the user picked the axes by `dp_mesh_dims`. `copies` is the user's own
    replicate axis, if `mesh` has this axis and a shard axis of this rank alone. `given` has the axes as the user gave
    them. `piece_axes` are the axes of `mesh` that cut a parameter, in the order of cutting. Transports are made on
    their first use, which all ranks of an axis make at the same moment.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        shard_axis: int | None,
        replicate_axis: int | None,
        full: DeviceMesh | None = None,
        dims: DataParallelMeshDims | None = None,
        comm: CommPolicy = CommPolicy(),
        shards_replicas: bool = False,
        keeps_unsharded: bool = False,
        copies: DeviceMesh | None = None,
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
        self.comm, self.sums_in_order = comm, comm.sums_in_order
        self.limits_policies = comm.sums_in_order or comm.encodes_gradients or comm.remembers
        self.remembers = comm.remembers
        self.copies = copies
        self.given = mesh if copies is None else copies
        self._joined: dict[tuple[bool, tuple[DeviceMesh, ...]], DeviceMesh] = {}
        self.shard_group = None if shard_axis is None else group_of(mesh, shard_axis)
        self.replicate_group = None if replicate_axis is None else group_of(mesh, replicate_axis)
        require_alive(default_group(), "the model")  # no other group's members can change (torch 2.14)
        self.num_shards = 1 if shard_axis is None else mesh.size(shard_axis)
        self.num_replicas = 1 if replicate_axis is None else mesh.size(replicate_axis)
        self.shard_rank = 0 if shard_axis is None else mesh.get_local_rank(shard_axis)
        self.replica = 0 if replicate_axis is None else mesh.get_local_rank(replicate_axis)
        self.keeps_unsharded = keeps_unsharded
        self.shards_replicas = shards_replicas and self.num_replicas > 1
        axes = (shard_axis, replicate_axis if self.shards_replicas else None)
        self.piece_axes = tuple(axis for axis in axes if axis is not None)
        self.num_owners = self.num_replicas if self.shards_replicas else 1
        self.num_pieces = self.num_shards * self.num_owners
        self.piece = self.pieces_of(self.shard_rank)[self.replica if self.shards_replicas else 0]
        self._alike(mesh)
        # Without communication, so that a policy that cannot be kept raises here and not at the first gather.
        for group in (self.shard_group, self.replicate_group):
            check_transport(group, self.device, comm)

    def with_axes(
        self, shard: int | None, replicate: int | None, shards_replicas: bool, keeps_unsharded: bool
    ) -> DataMesh:
        """Returns the same mesh with its axes in other roles."""
        dims = self.dims
        if dims is not None:
            names = {None: None, self.shard_axis: dims.shard, self.replicate_axis: dims.replicate}
            dims = DataParallelMeshDims(names[shard], names[replicate])
        return DataMesh(self.mesh, shard, replicate, self.full, dims, self.comm, shards_replicas, keeps_unsharded)

    def joined(self, others: Sequence[DeviceMesh], behind: bool = False) -> DeviceMesh:
        """Returns one mesh with the axes of this mesh and of `others`. With `behind`, this mesh's axes come last.

        Raises:
            RuntimeError: `others` are not parts of the mesh that `given` is a part of.
        """
        key = behind, tuple(others)
        if key not in self._joined:
            parts = [*others, self.given] if behind else [self.given, *others]
            joined = concatenate_meshes(parts)
            if not keeps_root_order(joined):  # torch redistributes only over the root's order, or over a new mesh
                joined = permuted(joined, range(joined.ndim))
            joined = joined if self.copies is None else self._with_one_rank(joined, parts.index(self.given))
            self._joined[key] = self._alike(joined)
        return self._joined[key]

    def _with_one_rank(self, mesh: DeviceMesh, at: int) -> DeviceMesh:
        """Returns `mesh` with an axis of this rank alone inserted behind axis `at`, which is `copies`."""
        names, groups = list(mesh.mesh_dim_names or ()), [mesh.get_group(axis) for axis in range(mesh.ndim)]
        names.insert(at + 1, ONE_RANK)
        assert self.shard_group is not None, "copies are shards of one rank"
        groups.insert(at + 1, self.shard_group)
        ranks = mesh.mesh.unsqueeze(at + 1)
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names))

    @cached_property
    def device(self) -> torch.device:
        """The device of unsharded parameters on this rank."""
        return device_of(self.mesh)

    def pieces_of(self, shard: int) -> range:
        """Returns the numbers of the parts of one shard: several with `shards_replicas`."""
        return range(shard * self.num_owners, (shard + 1) * self.num_owners)

    @property
    def holds_copies(self) -> bool:
        """True if other ranks hold the same elements as this one."""
        return self.num_replicas > 1 and not self.shards_replicas

    def copies_of_shards(self) -> list[list[int]]:
        """Returns the ranks that hold the same shard, for each shard."""
        ranks = self.mesh.mesh if self.shard_axis is None else self.mesh.mesh.movedim(self.shard_axis, 0)
        by_shard: list[list[int]] = ranks.reshape(self.num_shards, -1).tolist()
        return by_shard

    @cached_property
    def in_cut_order(self) -> DeviceMesh:
        """`mesh` with its axes in the order in which they cut parameters."""
        # DTensor reads placements from the left, so only in this order do they say which rank holds which part.
        return self._alike(permuted(self.mesh, self.piece_axes)) if self.shards_replicas else self.mesh

    def _alike(self, mesh: DeviceMesh) -> DeviceMesh:
        """Returns `mesh`, a mesh of this one's axes, on which gradients are added up as on this one."""
        if self.sums_in_order:
            _in_order[id(mesh)] = mesh
        return mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
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
    def only_sums(self) -> bool:
        """True if ranks hold unsharded parameters: no collective, a user's included, gathers or scatters."""
        return self.shard_axis is None and self.num_replicas > 1

    @property
    def piece_groups(self) -> list[dist.ProcessGroup]:
        """The groups, of more than one rank, along which ranks own different parts."""
        groups = (self.replicate_group if self.shards_replicas else None, self.shard_group)
        return [group for group in groups if group is not None and group.size() > 1]

    @cached_property
    def shard_transport(self) -> Transport:
        return self.transport_of(self.shard_group)

    @cached_property
    def gather_transport(self) -> Transport:
        """The transport that gathers parameters along the shard axis."""
        return _NO_TRANSPORT if self.comm.fake_all_gather else self.shard_transport

    @cached_property
    def gather_codec(self) -> Codec | None:
        """The codec of parameters for their gathers along the shard axis; None: they are not encoded."""
        if self.comm.gather is None or self.num_shards == 1:
            return None
        from sherd.codecs import codec_of  # of few policies, so loaded late

        return codec_of(self.comm.gather)

    @cached_property
    def wire_errors(self) -> dict[tuple[str, str], WireErrors]:
        """The errors of what is encoded, by the phase, gather or reduce, and the axis."""
        from sherd.comm.wire_errors import WireErrors  # of few policies, so loaded late

        over_shards, over_replicas = (each is not None and each.is_encoded for each in self.comm.reductions)
        ways = {
            ("gather", "shard"): self.gather_codec is not None,
            ("reduce", "shard"): self.num_shards > 1 and over_shards,
            ("reduce", "replicate"): self.num_replicas > 1 and over_replicas,
        }
        return {way: WireErrors(self.comm.error_limit is not None) for way, is_encoded in ways.items() if is_encoded}

    def of_copy(self) -> DataMesh:
        """Returns this mesh for a copy of its unit: with errors of its own, if anything is encoded."""
        if not self.wire_errors:
            return self
        roles = self.dims, self.comm, self.shards_replicas, self.keeps_unsharded, self.copies
        return DataMesh(self.mesh, self.shard_axis, self.replicate_axis, self.full, *roles)

    @cached_property
    def fetch_transport(self) -> Transport:
        """The transport that gathers the parts of a shard along the replicate axis."""
        return _NO_TRANSPORT if self.comm.fake_all_gather else self.transport_of(self.replicate_group)

    @cached_property
    def reduce_transport(self) -> Transport:
        return self._reducing(self.shard_group, self.comm.reduce, "shard")

    @cached_property
    def separate_reduce_transport(self) -> Transport:
        """A second transport along the shard axis, for reductions while all-gathers run. Collective at first."""
        if self.shard_group is None:
            return self.reduce_transport
        return self._reducing(self.reduction_group(), self.comm.reduce, "shard")

    @cached_property
    def replicate_transport(self) -> Transport:
        return self._reducing(self.replicate_group, self.comm.reductions[1], "replicate")

    def _reducing(self, group: dist.ProcessGroup | None, reduction: Reduction | None, axis: str) -> Transport:
        if self.comm.fake_reduce:
            return _NO_TRANSPORT
        transport = self.transport_of(group)
        if group is None or group.size() == 1 or reduction is None or reduction.is_in_order:
            return transport
        from sherd.comm.owner_sums import OwnerSums  # of few policies, so loaded late

        return OwnerSums(transport, group, reduction, self.wire_errors.get(("reduce", axis)))

    @cached_property
    def in_order(self) -> SumsInOrder | None:
        """The sums in the order of ranks, if the policy asks for them. Collective at first."""
        if not self.sums_in_order:
            return None
        from sherd.comm.owner_sums import SumsInOrder  # of few policies, so loaded late

        group = self.shard_group if self.num_replicas == 1 else self.replicate_group
        if self.num_shards > 1 and self.num_replicas > 1:
            group = _as_one_axis(self, shards=True).shard_group
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        num_cuts = self.num_replicas if self.holds_copies else 1
        transport = _NO_TRANSPORT if self.comm.fake_reduce else self.transport_of(group)
        reduction = self.comm.reduce
        assert reduction is not None, "it is in order"
        return SumsInOrder(transport, reduction, [*map(self._part_of, ranks)], self._part_of(dist.get_rank()), num_cuts)

    def _part_of(self, rank: int) -> int:
        """Returns which part of all gradients a global rank owns, where each rank owns one."""
        (at,) = (self.mesh.mesh == rank).nonzero().tolist()
        shard = 0 if self.shard_axis is None else at[self.shard_axis]
        replica = 0 if self.replicate_axis is None else at[self.replicate_axis]
        return int(shard * self.num_replicas + replica)

    def transport_of(self, group: dist.ProcessGroup | None) -> Transport:
        """Returns the transport between the ranks of `group`, a group of this mesh; None is this rank alone."""
        return transport_of(group, self.device, self.comm)

    def smaller_group(self, size: int) -> dist.ProcessGroup:
        """Returns the group of this rank and its neighbours: `size` ranks of the shard axis. Collective at first."""
        if size == self.num_shards and self.shard_group is not None:
            return self.shard_group  # a unit of several meshes may have one this small
        first = self.shard_rank // size * size
        return self._group_beside("neighbours", self.shard_ranks[first : first + size])

    def reduction_group(self) -> dist.ProcessGroup:
        """Returns a second group over the shard axis, for reductions while all-gathers run. Collective at first."""
        return self._group_beside("reduction", self.shard_ranks)

    def _group_beside(self, purpose: str, ranks: list[int]) -> dist.ProcessGroup:
        assert self.shard_group is not None, "only ranks that shard have such groups"
        return group_beside(self.shard_group, purpose, ranks, self.device)


_NO_TRANSPORT = NoTransport()
_in_order: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()


def sums_in_order(mesh: DeviceMesh) -> bool:
    """Returns whether gradients on `mesh` are added up in the order of ranks."""
    return _in_order.get(id(mesh)) is mesh


def data_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, comm: CommPolicy = CommPolicy()) -> DataMesh:
    """Read a user's mesh: 1-D shards, 2-D replicates over axis 0 and shards over axis 1, `dims` picks axes by name.

    Without a mesh, one axis has all ranks of the default process group, on the device of its backend.

    Raises:
        MeshError: no process group; another number of axes, a 2-D mesh without names, or a name that the mesh does not
            have.
    """
    if mesh is None:
        group = default_group()
        mesh = init_device_mesh(default_device_type(group), (group.size(),))
    if dims is not None:
        return _pick(mesh, dims, comm)
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


def permuted(mesh: DeviceMesh, order: Sequence[int]) -> DeviceMesh:
    """Returns a new mesh: `mesh` with its axes in another order, on the same process groups."""
    # A slice of `mesh` would not do: torch finds only slices in the order of their root mesh (2.13: `full_tensor` of
    # two axes that shard one dim).
    groups = [mesh.get_group(axis) for axis in order]
    names = mesh.mesh_dim_names
    assert names is not None, "a mesh of several axes has names, or it was refused"
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=mesh.mesh.permute(*order), mesh_dim_names=tuple(names[axis] for axis in order)
    )


def arranged(mesh: DataMesh, levels: Sequence[Level]) -> DataMesh:
    """Returns a mesh of the same ranks that shards over each data-parallel axis what its level says.

    Of two axes, the axis with the higher level is the shard axis, and the other one holds copies of the shards, or
    parts of them. Two axes that both shard parameters, or both shard nothing, become one axis.

    Args:
        mesh: the mesh as the user gave it.
        levels: one level per axis, in the mesh's order, or one for all axes.

    Raises:
        MeshError: another number of levels than axes.
    """
    axes = [axis for axis in (mesh.replicate_axis, mesh.shard_axis) if axis is not None]
    if len(levels) == 1:
        levels = tuple(levels) * len(axes)
    if len(levels) != len(axes):
        raise MeshError(
            f"placements for {len(levels)} data-parallel axes, but there is only one in {mesh.full or mesh.mesh}; make "
            "it two, init_device_mesh(..., (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
        )
    if set(levels) <= {Level.PARAMETERS}:
        return _as_one_axis(mesh, shards=True)
    if set(levels) <= {Level.COPIES}:
        return _as_one_axis(mesh, shards=False)
    if len(axes) == 1:
        return mesh.with_axes(axes[0], None, shards_replicas=False, keeps_unsharded=True)
    lower, higher = sorted(range(2), key=lambda at: levels[at])
    return mesh.with_axes(
        axes[higher],
        axes[lower],
        shards_replicas=levels[lower] is not Level.COPIES,
        keeps_unsharded=levels[higher] is not Level.PARAMETERS,
    )


def _as_one_axis(mesh: DataMesh, shards: bool) -> DataMesh:
    """Returns a mesh with all data-parallel axes as one axis, over which parameters are sharded or replicated."""
    if mesh.full is not None and mesh.dims is not None:
        names = (*mesh.dims.replicate_names, *mesh.dims.shard_names)
        dims = DataParallelMeshDims(shard=names) if shards else DataParallelMeshDims(replicate=names)
        one = _pick(mesh.full, dims, mesh.comm)
    else:
        flat = mesh.mesh
        if flat.ndim > 1:
            assert flat.mesh_dim_names is not None, "a 2-D mesh has names, or it was refused"
            flat = flatten_mesh(flat, "_".join(flat.mesh_dim_names))
        one = DataMesh(flat, 0, None, comm=mesh.comm)
    return one if shards else one.with_axes(None, 0, shards_replicas=False, keeps_unsharded=True)


def uncut(mesh: DataMesh) -> DataMesh:
    """Returns a mesh of the same ranks that cuts nothing; it keeps unsharded parameters as `mesh` does."""
    one = _as_one_axis(mesh, shards=False)
    return one.with_axes(None, one.replicate_axis, shards_replicas=False, keeps_unsharded=mesh.keeps_unsharded)


def default_device_type(group: dist.ProcessGroup | None = None) -> str:
    """Returns the type of the accelerator if `group` has a backend for it other than gloo, else "cpu".

    Args:
        group: a process group; None means the default group.

    Raises:
        MeshError: `group` was destroyed.
    """
    if group is not None:
        require_alive(group, "a given group")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if accelerator is None or backends.get(accelerator.type, "gloo") == "gloo":
        return "cpu"
    return accelerator.type


def mesh_of_groups(
    shard: dist.ProcessGroup,
    replicate: dist.ProcessGroup | None,
    device_type: str,
    comm: CommPolicy = CommPolicy(),
    copies: DeviceMesh | None = None,
) -> DataMesh:
    """Returns a mesh of the user's process groups: parameters are sharded over `shard`, replicated over `replicate`.

    The first call with two groups is collective over `replicate`. If `copies` is given, `replicate` is its group.

    Raises:
        MeshError: the two groups are not the row and the column of one grid of ranks, or one was destroyed.
    """
    if replicate is not None:
        require_alive(replicate, "a given group")
    known, key = meshes_of(shard), (replicate, device_type)
    if key not in known and replicate is None:
        known[key] = DeviceMesh.from_group(shard, device_type)
    if key not in known and replicate is not None:
        row = dist.get_process_group_ranks(shard)
        rows: list[list[int]] = all_gather_objects(row, "the comparison of shard groups", replicate)
        column = dist.get_process_group_ranks(replicate)
        at = row.index(dist.get_rank())
        if len({len(ranks) for ranks in rows}) > 1 or [ranks[at] for ranks in rows] != column:
            raise MeshError(
                f"the shard groups {rows} and the replicate group {column} are not rows and a column of one grid; give "
                "rank r of every shard group the replicate group of all ranks r"
            )
        known[key] = DeviceMesh.from_group(
            [replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
        )
    shard_axis, replicate_axis = (0, None) if replicate is None else (1, 0)
    return DataMesh(known[key], shard_axis, replicate_axis, comm=comm, copies=copies)


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
    """Returns the named axes as one axis."""
    if not names:
        return None
    names = tuple(name for name in mesh.mesh_dim_names or () if name in names)  # torch slices in the mesh's order
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))
