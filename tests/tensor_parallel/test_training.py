"""A tensor-parallel model that is sharded too trains as the plain one, and bit for bit as torch's FSDP does."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import sherd
from sherd import DataParallelMeshDims
from tests.support.ranks.bodies import on_processes, on_threads
from tests.tensor_parallel.training import (
    EVEN,
    ODD,
    Springs,
    assert_bit_equal,
    assert_trains,
    built,
    close,
    loss_of,
    mesh_of,
    plain,
    sharded,
    tensor_parallel,
    train,
    wholes,
)


def on_dim_1(parameter):
    return Shard(1) if parameter.ndim > 1 else None


# Two by two


def trained(sizes, library=sherd, **options):
    """On one of two by two ranks."""
    mesh = mesh_of((2, 2), "dp", "tp")
    net = tensor_parallel(built(sizes), mesh["tp"])
    sharded(net, with_=library.fully_shard, mesh=mesh["dp"], **options)
    with loss_parallel():
        return train(net, sizes, [mesh.get_local_rank("dp")], loss_of)


@pytest.mark.parametrize("placement_fn", [None, on_dim_1])
@on_processes(4)
def test_even_sizes_cut_on_any_dim_train_as_one_process_and_bit_for_bit_as_torchs(placement_fn):
    ours, torchs = (trained(EVEN, library, shard_placement_fn=placement_fn) for library in (sherd, fsdp))
    assert_bit_equal(ours, torchs)
    assert_trains(ours, plain(EVEN, 2))


@pytest.mark.parametrize("options", [{}, {"shard_placement_fn": on_dim_1}, {"placement": sherd.Flat()}])
@on_processes(4)
def test_odd_sizes_cut_on_any_dim_or_flat_train_as_one_process(options):
    assert_trains(trained(ODD, **options), plain(ODD, 2))


# Three axes


@pytest.mark.front("Other parallelism")
@pytest.mark.parametrize(
    ("num_ranks", "shape", "names"),
    [(8, (2, 2, 2), ("replicate", "shard", "tp")), (6, (2, 3), ("dp", "tp"))],
    ids=["hsdp", "by_three"],
)
@on_threads()
def test_replicas_of_shards_and_odd_numbers_of_ranks_train_as_one_process(shape, names):
    """The last axis is the tensor-parallel one."""
    mesh = mesh_of(shape, *names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    net = sharded(tensor_parallel(built(), mesh[names[-1]]), mesh=data)
    run = train(net, EVEN, [dist.get_rank() // shape[-1]])
    assert_trains(run, plain(EVEN, math.prod(shape[:-1])))


SHAPES = {"rows": (8, 6), "columns": (6, 8), "all": (5,)}


def pulled(model, samples):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for sample in samples:
            (model(sample - step) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


@pytest.mark.parametrize(
    ("num_ranks", "names", "dims", "placement_fn", "on_tp_alone", "shown"),
    [
        (
            8,
            ("copy", "shard", "tp"),
            {"shard": "shard", "replicate": "copy"},
            None,
            False,
            "copy=R shard=_S(0, 2) tp=S(0)",
        ),
        (8, ("dp", "cp", "tp"), {"shard": ("dp", "cp")}, None, False, "dp_cp=_S(0, 2) tp=S(0)"),
        (8, ("dp", "cp", "tp"), {"shard": ("dp", "cp")}, None, True, "dp_cp=_S(0, 2) tp=S(0)"),
        (8, ("dp", "cp", "tp"), {"shard": "cp", "replicate": "dp"}, on_dim_1, False, "dp=R cp=S(1) tp=S(0)"),
        (4, ("tp", "dp"), {"shard": "dp"}, None, False, "tp=S(0) dp=S(0)"),
        (4, ("dp", "tp"), {"replicate": "dp"}, None, False, "dp=R tp=S(0)"),
    ],
    ids=["replicas", "context_parallel", "context_parallel_apart", "on_dim_1", "tp_first", "only_replicas"],
)
@on_threads()
def test_named_axes_of_one_mesh_shard_or_replicate_and_several_shard_as_one(
    names, dims, placement_fn, on_tp_alone, shown
):
    """`on_tp_alone`: the parameters are on that axis, and the mesh has the others."""
    mesh = mesh_of((2,) * len(names), *names)
    model = Springs(SHAPES).on(mesh["tp"] if on_tp_alone else mesh)
    data = mesh[tuple(each for each in names if each != "tp")] if on_tp_alone else mesh
    dims = DataParallelMeshDims(**dims)
    sherd.fully_shard(model, mesh=data, dp_mesh_dims=dims, shard_placement_fn=placement_fn)
    axes = zip(model.rows.device_mesh.mesh_dim_names, model.rows.placements, strict=True)
    assert " ".join(f"{axis}={placement}" for axis, placement in axes) == shown
    sample = 0
    for axis in names:
        if axis != "tp":
            sample = 2 * sample + mesh.get_local_rank(axis)
    expected = pulled(Springs(SHAPES), range(2 ** (len(names) - 1)))
    close(pulled(model, [sample]), expected)


@pytest.mark.parametrize(
    ("names", "dims"),
    [
        (("dp", "tp"), {"shard": "dp"}),
        (("tp", "dp"), {"shard": "dp"}),
        (("copy", "shard", "tp"), {"shard": "shard", "replicate": "copy"}),
        (("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
        (("dp", "tp"), None),
    ],
    ids=["named", "behind", "replicas", "folded", "beside"],
)
@on_threads(8)
def test_replicated_parameters_keep_their_tensor_parallel_placement_and_train_as_one_process(names, dims):
    """All but the rows."""
    mesh = mesh_of((2, 2, 2) if len(names) == 3 else (4, 2), *names)
    model = Springs(SHAPES).on(mesh if dims else mesh["tp"])
    sherd.fully_shard(
        model,
        mesh=mesh if dims else mesh["dp"],
        dp_mesh_dims=DataParallelMeshDims(**dims) if dims else None,
        shard_placement_fn=lambda each: None if each is model.rows else Replicate(),
    )
    assert len({each.device_mesh for each in model.parameters()}) == 1
    assert model.columns.to_local().numel() == 48 // mesh["tp"].size()
    sample = 0
    for axis, name in enumerate(names):
        if name != "tp":
            sample = sample * mesh.size(axis) + mesh.get_local_rank(axis)
    expected = pulled(Springs(SHAPES), range(8 // mesh["tp"].size()))
    close(pulled(model, [sample]), expected)
