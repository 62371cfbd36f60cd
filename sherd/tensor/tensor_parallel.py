"""The DTensor layout of a shard: of a plain parameter, or of one that is tensor parallel already.

A tensor-parallel parameter was cut by its own axes first, and then by ours. DTensor reads placements from left to
right. We put our axes in front, as everywhere else, and where both cut one dim, DTensor calls ours strided. A tensor of
10 rows over `tp` of 2 and `dp` of 2, on the mesh (dp, tp), `[_StridedShard(0, split_factor=2), Shard(0)]`:

    tp 0 | 0 1 2 3 4 |   dp 0 | 0 1 2 |        read from the left   dp 0 | 0 1 2 5 6 7 |   tp 0 | 0 1 2 |
                         dp 1 | 3 4   |                                                    tp 1 | 5 6 7 |
    tp 1 | 5 6 7 8 9 |   dp 0 | 5 6 7 |                             dp 1 | 3 4 8 9 |       tp 0 | 3 4   |
                         dp 1 | 8 9   |                                                    tp 1 | 8 9   |

For 9 rows over `dp` of 4, DTensor would look in the wrong place: row 8 is on tp 1, dp 3, but DTensor expects it on tp
0, dp 3, which holds nothing. For such a tensor our axis goes behind, on the mesh (tp, dp), where DTensor reads the axes
in the order in which they cut. Runs have no such problem: they cut the local tensor that the other axes leave to a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as ReplicateSpec
from torch.distributed.tensor import Shard as ShardSpec
from torch.distributed.tensor.placement_types import Placement as PlacementSpec

from sherd._torch import DTensorSpec, all_gather_single, dtensor_spec, strided_shard
from sherd.comm.mesh import DataMesh, permuted
from sherd.errors import MeshError, OwnershipError, PlacementError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs
from sherd.tensor.placement import ragged_spec
from sherd.tensor.vectors import VectorShard


def own_spec(mesh: DataMesh, cut: Cut, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    return _shard_spec(shape, dtype, [], (), mesh, cut, "a plain parameter")


def _copies(mesh: DataMesh) -> tuple[PlacementSpec, ...]:
    return (ReplicateSpec(),) * mesh.mesh.ndim


def on_other_axes(unsharded: DTensorSpec, mesh: DataMesh, cut: Cut, name: str) -> DTensorSpec:
    """Returns the spec of the shard of a parameter that is a DTensor on another mesh. `cut` cuts its local tensor.

    Raises:
        MeshError: the two meshes have ranks or an axis in common, or are not parts of one mesh.
        PlacementError: the parameter is a partial sum.
        OwnershipError: the two meshes are the same.
    """
    if unsharded.mesh in (mesh.mesh, mesh.given):
        raise OwnershipError(
            f"{name}: it is a DTensor on the very mesh it would be sharded over, {mesh.mesh}, so something has sharded "
            "it already (a unit that no longer exists?): build the model again; or it is tensor parallel on it: shard "
            "it over another axis"
        )
    _require_no_sums(unsharded, name)
    return _shard_spec(unsharded.shape, _dtype(unsharded), [unsharded.mesh], unsharded.placements, mesh, cut, name)


def on_full_mesh(unsharded: DTensorSpec, mesh: DataMesh, cut: Cut, name: str) -> DTensorSpec:
    """Returns the spec of the shard of a parameter that is a DTensor on the full mesh.

    The user named the data-parallel axes of the full mesh. If it has no others, the parameter may be on another mesh.

    Raises:
        PlacementError: the parameter is on a mesh that does not fit, is not replicated on a data-parallel axis, or is a
            partial sum.
    """
    assert mesh.full is not None and mesh.dims is not None, "only named axes come from a full mesh"
    full, names = mesh.full, mesh.full.mesh_dim_names or ()
    if unsharded.mesh != full and set(names) == {*mesh.dims.shard_names, *mesh.dims.replicate_names}:
        return on_other_axes(
            unsharded, mesh, cut, name
        )  # a mesh of data-parallel axes only, named to say which does what
    if unsharded.mesh != full:
        raise PlacementError(
            f"{name}: it is a DTensor on {unsharded.mesh}, not on the mesh that fully_shard was given, {full}"
        )
    for axis_name in (*mesh.dims.shard_names, *mesh.dims.replicate_names):
        placement = unsharded.placements[names.index(axis_name)]
        if not placement.is_replicate():
            raise PlacementError(
                f"{name}: data-parallel axis {axis_name!r} must find it replicated, its placement there is "
                f"{placement}; distribute it with Replicate() on the data-parallel axes"
            )
    _require_no_sums(unsharded, name)
    if len(mesh.dims.shard_names) <= 1 and len(mesh.dims.replicate_names) <= 1 and not mesh.shards_replicas:
        spec = _in_place(unsharded, mesh, cut)
        if spec is not None:
            return spec
    # Several axes were flattened into one, or ours must go behind: a mesh of the data axes and the remaining ones.
    data_axes = {names.index(each) for each in (*mesh.dims.shard_names, *mesh.dims.replicate_names)}
    others = [axis for axis in range(full.ndim) if axis not in data_axes]
    remaining = tuple(unsharded.placements[axis] for axis in others)
    meshes = [full[names[axis]] for axis in others]
    return _shard_spec(unsharded.shape, _dtype(unsharded), meshes, remaining, mesh, cut, name)


def _in_place(unsharded: DTensorSpec, mesh: DataMesh, cut: Cut) -> DTensorSpec | None:
    """Returns the spec on the parameter's own mesh, in which the shard axis cuts, too; None if DTensor misreads it."""
    assert mesh.full is not None and mesh.dims is not None, "only named axes come from a full mesh"
    if not mesh.dims.shard_names or (cut.dim is None and not cut.in_line):
        return unsharded
    axis = (mesh.full.mesh_dim_names or ()).index(mesh.dims.shard_names[0])
    if isinstance(cut, Runs):
        return ragged_spec(mesh.full, unsharded.placements, unsharded.shape, _dtype(unsharded), cut, (axis,))
    dim = cut.dim
    assert dim is not None, "a parameter that is not cut keeps its spec"
    sizes = [mesh.full.size(at) if _cuts_dim(each, dim) else 1 for at, each in enumerate(unsharded.placements)]
    before, behind = sizes[:axis], sizes[axis + 1 :]
    strided = any(_is_strided(each) for each in unsharded.placements)
    if not all(_reads_as_cut(n, mesh.num_shards, behind, strided) for n in set(_parts(unsharded.shape[dim], before))):
        return None
    placements = (*unsharded.placements[:axis], _shard(dim, prod(behind)), *unsharded.placements[axis + 1 :])
    return dtensor_spec(mesh.full, placements, unsharded.shape, _dtype(unsharded))


def _shard_spec(
    shape: torch.Size,
    dtype: torch.dtype,
    meshes: Sequence[DeviceMesh],
    remaining: tuple[PlacementSpec, ...],
    mesh: DataMesh,
    cut: Cut,
    name: str,
) -> DTensorSpec:
    """Returns the spec of a shard on the data-parallel axes and on `meshes`, whose axes have placements `remaining`.

    Our axes are in front, or behind where DTensor would misread them in front.
    """
    _require_apart(mesh.given, meshes, name)
    joined = _joined(mesh, meshes, name) if meshes else mesh.mesh
    if isinstance(cut, Runs):
        return ragged_spec(joined, (*_copies(mesh), *remaining), shape, dtype, cut, mesh.piece_axes)
    dim = cut.dim if mesh.shard_axis is not None else None
    if mesh.shards_replicas:
        in_cut_order = permuted(joined, (*range(mesh.mesh.ndim, joined.ndim), *mesh.piece_axes))
        last = (ReplicateSpec() if dim is None else ShardSpec(dim),) * len(mesh.piece_axes)
        return dtensor_spec(in_cut_order, (*remaining, *last), shape, dtype)
    sizes = [each.size(axis) for each in meshes for axis in range(each.ndim)]
    behind = [size for size, placement in zip(sizes, remaining, strict=True) if _cuts_dim(placement, dim)]
    strided = any(_is_strided(each) for each in remaining)
    is_in_front = dim is None or _reads_as_cut(shape[dim], mesh.num_shards, behind, strided)
    data = list(_copies(mesh))
    if dim is not None and mesh.shard_axis is not None:
        data[mesh.shard_axis] = _shard(dim, prod(behind) if is_in_front else 1)
    if is_in_front:
        return dtensor_spec(joined, (*data, *remaining), shape, dtype)
    return dtensor_spec(_joined(mesh, meshes, name, behind=True), (*remaining, *data), shape, dtype)


def merged_spec(
    mesh: DataMesh, cut: Runs, dtype: torch.dtype, members: Sequence[tuple[DTensorSpec | None, Extent]], name: str
) -> DTensorSpec:
    """Returns the spec of a flat parameter: a vector of its members' local tensors, cut as `cut`.

    Collective over the tensor-parallel axes, whose ranks may have vectors of other lengths.

    `members` are the spec of each member before sharding, None for a plain tensor, and its place in the vector. `name`
    is that of the first member, for messages.
    """
    specs = [unsharded for unsharded, _ in members if unsharded is not None]
    axes = list(dict.fromkeys(axis for unsharded in specs for axis in _axes_of(unsharded.mesh)))
    if not axes:
        return own_spec(mesh, cut, torch.Size(cut.shape), dtype)
    joined, numel = _joined(mesh, axes, name), cut.numel
    placements: list[PlacementSpec] = []
    # From the last axis on: each axis adds up what the axes behind it leave to its ranks.
    for axis in reversed(axes):
        copies = tuple(extent for unsharded, extent in members if _is_copied(unsharded, axis))
        if axis.size() == 1 or len(copies) == len(members):
            placements.insert(0, ReplicateSpec())
            continue
        sizes = torch.empty(axis.size(), dtype=torch.int64, device=mesh.device)
        all_gather_single(sizes, torch.tensor([numel], device=mesh.device), group=axis.get_group())
        placements.insert(0, VectorShard(tuple(sizes.tolist()), copies))
        numel = int(sizes.sum().item())
    return ragged_spec(joined, (*_copies(mesh), *placements), (numel,), dtype, cut, mesh.piece_axes)


def _axes_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    return [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.mesh_dim_names or ()]


def _is_copied(unsharded: DTensorSpec | None, axis: DeviceMesh) -> bool:
    """Returns True if the ranks of `axis` have the same elements of a parameter, as of every plain one."""
    if unsharded is None or axis not in (axes := _axes_of(unsharded.mesh)):
        return True
    return unsharded.placements[axes.index(axis)].is_replicate()


# Reading from the left


def _reads_as_cut(size: int, num_shards: int, behind: Sequence[int], strided: bool) -> bool:
    """Returns True if DTensor looks for each of `size` rows on the rank that holds it.

    The tensor-parallel axes, of sizes `behind`, cut the rows first, and our axis last. DTensor reads a mesh from left
    to right: our axis first, as a strided shard, then `behind`. `strided`: one of `behind` is a strided shard itself.
    """
    if size % (num_shards * prod(behind)) == 0:
        return True
    if strided:
        return False
    parts = _parts(size, behind)
    if parts != [each.numel for each in chunks(size, prod(behind))]:
        return False
    by_rank = zip(*([each.numel for each in chunks(part, num_shards)] for part in parts), strict=True)
    return all(list(numels) == _parts(sum(numels), behind) for numels in by_rank)


def _parts(size: int, cuts: Sequence[int]) -> list[int]:
    """Returns the sizes of the parts that axes of sizes `cuts`, one after the other, make of `size` rows."""
    parts = [size]
    for num_parts in cuts:
        parts = [each.numel for part in parts for each in chunks(part, num_parts)]
    return parts


def _cuts_dim(placement: PlacementSpec, dim: int | None) -> bool:
    """Returns True if `placement` cuts `dim`, strided or not. torch's `is_shard` is False for strided ones (2.13)."""
    return dim is not None and getattr(placement, "dim", None) == dim


def _is_strided(placement: PlacementSpec) -> bool:
    return getattr(placement, "split_factor", 1) != 1


def _shard(dim: int, split: int) -> PlacementSpec:
    return ShardSpec(dim) if split == 1 else strided_shard(dim, split)


# What does not fit


def _require_no_sums(unsharded: DTensorSpec, name: str) -> None:
    """Raise `PlacementError` if the parameter is a partial sum."""
    for axis, placement in enumerate(unsharded.placements):
        if placement.is_partial():
            axis_name = axis if unsharded.mesh.mesh_dim_names is None else repr(unsharded.mesh.mesh_dim_names[axis])
            raise PlacementError(
                f"{name}: its placement on axis {axis_name} is {placement}, a sum that was not reduced yet, so there "
                "is no value for an optimizer to change; redistribute it to Replicate() or Shard(dim), then fully_shard"
            )


def _require_apart(data: DeviceMesh, meshes: Sequence[DeviceMesh], name: str) -> None:
    """Raise `MeshError` unless `data` and `meshes` can be axes of one mesh.

    Two axes of one mesh have this rank in common and no other.
    """
    for other in meshes:
        pair = f"{name}: it is a DTensor on {other} and is to be sharded over {data}"
        common = set(data.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())
        if len(common) > 1:
            raise MeshError(
                f"{pair}, which have ranks {sorted(common)} in common: give fully_shard the data-parallel axes alone, "
                "as mesh['dp'] of a mesh (dp, tp), or the mesh that the parameter is on and dp_mesh_dims"
            )
        if data.mesh_dim_names is None or other.mesh_dim_names is None or data.device_type != other.device_type:
            raise MeshError(
                f"{pair}; the two must be parts of one mesh whose axes have names: "
                "mesh = init_device_mesh(device_type, (2, 4), mesh_dim_names=('dp', 'tp')), parallelize_module over "
                "mesh['tp'] and fully_shard over mesh['dp']"
            )
        twice = set(data.mesh_dim_names) & set(other.mesh_dim_names)
        if twice:
            raise MeshError(
                f"{pair}: axis {twice.pop()!r} would be named twice; take both from one mesh, whose axes have names "
                "of their own"
            )


def _joined(mesh: DataMesh, others: Sequence[DeviceMesh], name: str, behind: bool = False) -> DeviceMesh:
    """Returns one mesh with the axes of all meshes, the data-parallel ones in front or behind."""
    try:
        return mesh.joined(others, behind)
    except RuntimeError as error:
        raise MeshError(
            f"{name}: it would be sharded over {' and '.join(map(str, (mesh.given, *others)))}, which are no parts of "
            f"one mesh ({error}); take both from one init_device_mesh(...)"
        ) from error


def _dtype(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None, "a DTensor's spec knows its dtype"
    return spec.tensor_meta.dtype
