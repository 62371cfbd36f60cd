"""Which axes of a user's mesh shard and which replicate, and what is said about a mesh that does not fit."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sherd._torch import imagined_ranks
from sherd.comm.mesh import DataMesh, data_mesh, default_device_type
from sherd.errors import MeshError, PolicyError
from sherd.policy import DataParallelMeshDims
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import refusal

Axes = tuple[int | None, list[int] | None, int | None, list[int] | None, int]


def axes(mesh: DataMesh) -> Axes:
    """Size and ranks of the shard axis, of the replicate axis, and where this rank stands in the first."""
    shard = None if mesh.shard_group is None else dist.get_process_group_ranks(mesh.shard_group)
    replicas = None if mesh.replicate_group is None else dist.get_process_group_ranks(mesh.replicate_group)
    return mesh.num_shards, shard, mesh.num_replicas, replicas, mesh.shard_rank


DIMS = DataParallelMeshDims

# A mesh, what is named of it, and by rank the size and ranks of the shard axis, of the replicate axis, and the place in
# the first.
PICKED = {
    "one axis shards": ((2,), None, None, {0: (2, [0, 1], 1, None, 0), 1: (2, [0, 1], 1, None, 1)}),
    "of two axes the first replicates": (
        (2, 2),
        ("copies", "parts"),
        None,
        {0: (2, [0, 1], 2, [0, 2], 0), 3: (2, [2, 3], 2, [1, 3], 1)},
    ),
    "named axes of a larger mesh, in another order": (
        (2, 1, 2),
        ("dp", "tp", "copies"),
        DIMS(shard="dp", replicate="copies"),
        {0: (2, [0, 2], 2, [0, 1], 0), 3: (2, [1, 3], 2, [2, 3], 1)},
    ),
    "one named axis; the other is the user's": ((2, 2), ("dp", "tp"), DIMS(shard="dp"), {1: (2, [1, 3], 1, None, 0)}),
    "two named axes as one": ((2, 2), ("dp", "cp"), DIMS(shard=("dp", "cp")), {2: (4, [0, 1, 2, 3], 1, None, 2)}),
    "a replicate axis alone": ((2,), ("dp",), DIMS(replicate="dp"), {1: (1, None, 2, [0, 1], 0)}),
}


def test_axes_shard_and_replicate_by_their_order_or_by_name():
    for case, (shape, names, dims, by_rank) in PICKED.items():
        for rank, expected in by_rank.items():
            with imagined_ranks(math.prod(shape), rank):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                assert axes(data_mesh(mesh, dims)) == expected, (case, rank)


REFUSED = [
    ((1, 1, 1), ("a", "b", "c"), None, ("got 3 axes", "dp_mesh_dims=DataParallelMeshDims(")),
    ((1, 1), None, None, ("mesh_dim_names=('replicate', 'shard')",)),
    ((1,), None, DIMS(shard="dp"), ("the mesh has none",)),
    ((1, 1), ("dp", "tp"), DIMS(shard="ddp"), ("'ddp'", "('dp', 'tp')")),
]


def test_axes_that_are_too_many_nameless_or_unknown_are_refused_with_what_to_give():
    with imagined_ranks(1):
        for shape, names, dims, words in REFUSED:
            said = refusal(MeshError, data_mesh, init_device_mesh("cpu", shape, mesh_dim_names=names), dims)
            for word in words:
                assert word in said, (shape, names)


def test_no_mesh_means_the_accelerator_where_the_group_has_more_than_gloo_for_it(monkeypatch):
    for backends, device in (
        ("cpu:gloo,xpu:xccl", "xpu"),
        ("xpu:xccl", "xpu"),
        ("cpu:gloo,cuda:nccl2", "cuda"),
        ("cuda:nccl-lazy", "cuda"),
        ("cpu:gloo", "cpu"),  # the group has nothing for the accelerator
        ("cpu:gloo,xpu:gloo", "cpu"),
        ("mps:gloo", "cpu"),  # gloo alone is for CPU ranks
    ):
        here = torch.device(next(each for each in ("mps", "cuda", "xpu") if each in backends or each == "xpu"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False, here=here: here)
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(dist, "get_backend_config", lambda group=None, backends=backends: backends)
            patch.setattr(dist, "get_backend", lambda group=None, backends=backends: backends)
            assert default_device_type() == device, backends


@on_processes(2)
def test_no_mesh_means_all_ranks_of_a_gloo_group_on_the_cpu():
    mesh = data_mesh(None, None)
    assert axes(mesh) == (2, [0, 1], 1, None, dist.get_rank())
    assert mesh.device.type == "cpu"


def test_mesh_dims_must_name_at_least_one_axis_and_none_for_both_purposes():
    for shard, replicate, words in (
        *((nothing, nothing, "at least one axis name") for nothing in (None, ())),
        *((("a", "b"), "b", "twice"), (("a", "c"), "c", "twice"), (("dp", "dp"), None, "twice"), ("dp", "dp", "twice")),
    ):
        assert words in refusal(PolicyError, DIMS, shard=shard, replicate=replicate), (shard, replicate)


# Extra groups


@on_processes(4)
def test_a_smaller_group_is_the_neighbours_made_once_and_reductions_can_have_their_own_of_the_same_ranks():
    mesh, other = data_mesh(None, None), data_mesh(None, None)
    pair = mesh.smaller_group(2)
    assert dist.get_process_group_ranks(pair) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
    assert pair is mesh.smaller_group(2)
    if mesh.shard_group is other.shard_group:
        assert mesh.reduction_group() is other.reduction_group()
    assert mesh.reduction_group() is not mesh.shard_group
