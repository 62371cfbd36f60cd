"""Which axes of a user's mesh shard and which replicate, and what is said about a mesh that does not fit?"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sherd.comm.mesh import DataMesh, data_mesh, default_device_type
from sherd.errors import MeshError, PolicyError
from sherd.policy import DataParallelMeshDims

Axes = tuple[int | None, list[int] | None, int | None, list[int] | None, int]


def axes(mesh: DataMesh) -> Axes:
    """Size and ranks of the shard axis, of the replicate axis, and where this rank stands in the first."""
    shard = None if mesh.shard_group is None else dist.get_process_group_ranks(mesh.shard_group)
    replicas = None if mesh.replicate_group is None else dist.get_process_group_ranks(mesh.replicate_group)
    return mesh.num_shards, shard, mesh.num_replicas, replicas, mesh.shard_rank


def axes_of(shape, names, dims=None) -> Axes:
    return axes(data_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), dims))


def axes_of_default_mesh() -> tuple[Axes, str]:
    mesh = data_mesh(None, None)
    return axes(mesh), mesh.device.type


def error_of(shape, names, dims=None) -> str:
    with pytest.raises(MeshError) as raised:
        data_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), dims)
    return str(raised.value)


def test_a_mesh_of_one_axis_shards_over_it_and_replicates_over_nothing(world):
    found = world(2).run(axes_of, (2,), None)
    assert found == [(2, [0, 1], 1, None, 0), (2, [0, 1], 1, None, 1)]


def test_a_mesh_of_two_axes_replicates_over_the_first_and_shards_over_the_second(world):
    found = world(4).run(axes_of, (2, 2), ("copies", "parts"))
    assert found[0] == (2, [0, 1], 2, [0, 2], 0)
    assert found[3] == (2, [2, 3], 2, [1, 3], 1)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,xpu:xccl", "xpu"),
        ("xpu:xccl", "xpu"),
        ("cpu:gloo", "cpu"),  # the group has nothing for the accelerator
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("mps:gloo", "cpu"),  # gloo alone is for CPU ranks
    ],
)
def test_no_mesh_means_the_accelerator_where_the_group_has_more_than_gloo_for_it(monkeypatch, backends, device):
    here = torch.device("mps" if "mps" in backends else "xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backends)
    assert default_device_type() == device


def test_no_mesh_means_all_ranks_of_a_gloo_group_on_the_cpu(world):
    assert world(2).run(axes_of_default_mesh)[1] == ((2, [0, 1], 1, None, 1), "cpu")


def test_named_axes_of_a_larger_mesh_are_picked_whatever_their_order(world):
    dims = DataParallelMeshDims(shard="dp", replicate="copies")
    found = world(4).run(axes_of, (2, 1, 2), ("dp", "tp", "copies"), dims)
    assert found[0] == (2, [0, 2], 2, [0, 1], 0)
    assert found[3] == (2, [1, 3], 2, [2, 3], 1)


def test_a_single_named_axis_shards_and_the_others_are_left_to_the_user(world):
    found = world(4).run(axes_of, (2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp"))
    assert found[1] == (2, [1, 3], 1, None, 0)


def test_several_named_axes_are_flattened_into_one(world):
    found = world(4).run(axes_of, (2, 2), ("dp", "cp"), DataParallelMeshDims(shard=("dp", "cp")))
    assert found[2] == (4, [0, 1, 2, 3], 1, None, 2)


def test_naming_only_a_replicate_axis_shards_nothing(world):
    found = world(2).run(axes_of, (2,), ("dp",), DataParallelMeshDims(replicate="dp"))
    assert found[1] == (1, None, 2, [0, 1], 0)


def test_three_axes_are_refused_with_the_way_to_name_two_of_them(world):
    (said,) = world(1).run(error_of, (1, 1, 1), ("a", "b", "c"))
    assert "got 3 axes" in said
    assert "dp_mesh_dims=DataParallelMeshDims(" in said


def test_two_axes_without_names_are_refused_with_the_names_to_give(world):
    (said,) = world(1).run(error_of, (1, 1), None)
    assert "mesh_dim_names=('replicate', 'shard')" in said


def test_picking_axes_by_name_needs_names(world):
    (said,) = world(1).run(error_of, (1,), None, DataParallelMeshDims(shard="dp"))
    assert "the mesh has none" in said


def test_a_name_the_mesh_does_not_have_is_shown_beside_those_that_it_has(world):
    (said,) = world(1).run(error_of, (1, 1), ("dp", "tp"), DataParallelMeshDims(shard="ddp"))
    assert "'ddp'" in said
    assert "('dp', 'tp')" in said


@pytest.mark.parametrize(("shard", "replicate"), [(None, None), ((), ())])
def test_mesh_dims_must_name_at_least_one_axis(shard, replicate):
    with pytest.raises(PolicyError, match="at least one axis name"):
        DataParallelMeshDims(shard=shard, replicate=replicate)


def test_mesh_dims_may_not_name_an_axis_for_both_purposes():
    with pytest.raises(PolicyError, match="twice"):
        DataParallelMeshDims(shard=("a", "b"), replicate="b")


# Extra groups


def extra_groups() -> tuple[list[int], bool, bool]:
    mesh, other = data_mesh(None, None), data_mesh(None, None)
    pair = mesh.smaller_group(2)
    made_once = pair is mesh.smaller_group(2)
    shared = mesh.reduction_group() is other.reduction_group() if mesh.shard_group is other.shard_group else True
    apart = mesh.reduction_group() is not mesh.shard_group
    return dist.get_process_group_ranks(pair), made_once and shared, apart


def test_a_smaller_group_is_the_neighbours_and_is_made_once(world):
    found = world(4).run(extra_groups)
    assert [ranks for ranks, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(once for _, once, _ in found)


def test_reductions_can_have_a_group_of_their_own_over_the_same_ranks(world):
    assert all(apart for _, _, apart in world(4).run(extra_groups))
