"""A tensor-parallel model that is sharded too trains as the plain one, and bit for bit as torch's FSDP does."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import sherd
from sherd import DataParallelMeshDims
from tests.tensor_parallel.training import (
    EVEN,
    ODD,
    assert_bit_equal,
    assert_same,
    built,
    close,
    mesh_of,
    plain,
    sharded,
    tensor_parallel,
    train,
    train_with_parallel_loss,
    wholes,
)


def on_dim_1(parameter):
    return Shard(1) if parameter.ndim > 1 else None


# Two by two


LIBRARIES = {"sherd": sherd, "torch": fsdp}


def trained(ways):
    """Of sizes, library and options each."""
    mesh, runs = mesh_of((2, 2), "dp", "tp"), []
    for sizes, library, options in ways:
        net = tensor_parallel(built(sizes), mesh["tp"])
        sharded(net, with_=LIBRARIES[library].fully_shard, mesh=mesh["dp"], **options)
        runs.append(train_with_parallel_loss(net, sizes, mesh.get_local_rank("dp")))
    return runs


@pytest.mark.parametrize("placement_fn", [None, on_dim_1])
def test_even_sizes_cut_on_any_dim_train_as_one_process_and_bit_for_bit_as_torchs(world, placement_fn):
    ways = [(EVEN, library, {"shard_placement_fn": placement_fn}) for library in LIBRARIES]
    runs = world(4).run(trained, ways)
    for ours, torchs in runs:
        assert_bit_equal(ours, torchs)
    assert_same([ours for ours, _ in runs], plain(EVEN, 2))


@pytest.mark.parametrize("options", [{}, {"shard_placement_fn": on_dim_1}, {"placement": sherd.Flat()}])
def test_odd_sizes_cut_on_any_dim_or_flat_train_as_one_process(world, options):
    assert_same([run for (run,) in world(4).run(trained, [(ODD, "sherd", options)])], plain(ODD, 2))


# Three axes


def train_beside(shape, names):
    """Data-parallel axes `names[:-1]`, the last is the tensor-parallel one."""
    mesh = mesh_of(shape, *names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    net = sharded(tensor_parallel(built(), mesh[names[-1]]), mesh=data)
    return train(net, EVEN, [dist.get_rank() // shape[-1]])


@pytest.mark.front("Other parallelism")
@pytest.mark.parametrize(
    ("shape", "names"), [((2, 2, 2), ("replicate", "shard", "tp")), ((2, 3), ("dp", "tp"))], ids=["hsdp", "by_three"]
)
def test_replicas_of_shards_and_odd_numbers_of_ranks_train_as_one_process(threads, shape, names):
    runs = threads(math.prod(shape)).run(train_beside, shape, names)
    assert_same(runs, plain(EVEN, math.prod(shape[:-1])))


class Springs(nn.Module):
    """Each element is drawn to where the sample says; on one mesh of every axis the parts of a tensor need no other.

    (What DTensor works out about products on three axes takes it seconds.)
    """

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)  # threads share the default one
        shapes = ((8, 6), (6, 8), (5,))
        self.rows, self.columns, self.all = (nn.Parameter(torch.randn(each, generator=generator)) for each in shapes)
        self.mesh = None

    def on(self, mesh):
        for name, way in (("rows", Shard(0)), ("columns", Shard(1)), ("all", Replicate())):
            placements = [way if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names]
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), mesh, placements)))
        self.mesh = mesh
        return self

    def forward(self, sample):
        return sum((self.part(each) - sample).square().sum() for each in self.parameters())

    def part(self, parameter):
        if self.mesh is None:
            return parameter
        data_axes_sum = [
            placement if axis == "tp" else Partial()
            for axis, placement in zip(self.mesh.mesh_dim_names, parameter.placements, strict=True)
        ]
        return parameter.to_local(grad_placements=data_axes_sum)


def pulled(model, samples):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for sample in samples:
            (model(sample - step) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


def pull_on_named_axes(names, dims, placement_fn, on_tp_alone):
    """`on_tp_alone`: the parameters are on that axis, and the mesh has the others."""
    mesh = mesh_of((2,) * len(names), *names)
    model = Springs().on(mesh["tp"] if on_tp_alone else mesh)
    data = mesh[tuple(each for each in names if each != "tp")] if on_tp_alone else mesh
    dims = DataParallelMeshDims(**dims)
    sherd.fully_shard(model, mesh=data, dp_mesh_dims=dims, shard_placement_fn=placement_fn)
    axes = zip(model.rows.device_mesh.mesh_dim_names, model.rows.placements, strict=True)
    shown = " ".join(f"{axis}={placement}" for axis, placement in axes)
    sample = 0
    for axis in names:
        if axis != "tp":
            sample = 2 * sample + mesh.get_local_rank(axis)
    return pulled(model, [sample]), shown


@pytest.mark.parametrize(
    ("names", "dims", "placement_fn", "on_tp_alone", "shown"),
    [
        (
            ("replicate", "shard", "tp"),
            {"shard": "shard", "replicate": "replicate"},
            None,
            False,
            "replicate=R shard=_S(0, 2) tp=S(0)",
        ),
        (("dp", "cp", "tp"), {"shard": ("dp", "cp")}, None, False, "dp_cp=_S(0, 2) tp=S(0)"),
        (("dp", "cp", "tp"), {"shard": ("dp", "cp")}, None, True, "dp_cp=_S(0, 2) tp=S(0)"),
        (("dp", "cp", "tp"), {"shard": "cp", "replicate": "dp"}, on_dim_1, False, "dp=R cp=S(1) tp=S(0)"),
        (("tp", "dp"), {"shard": "dp"}, None, False, "tp=S(0) dp=S(0)"),
        (("dp", "tp"), {"replicate": "dp"}, None, False, "dp=R tp=S(0)"),
    ],
    ids=["replicas", "context_parallel", "context_parallel_apart", "on_dim_1", "tp_first", "only_replicas"],
)
def test_named_axes_of_one_mesh_shard_or_replicate_and_several_shard_as_one(
    threads, names, dims, placement_fn, on_tp_alone, shown
):
    runs = threads(2 ** len(names)).run(pull_on_named_axes, names, dims, placement_fn, on_tp_alone)
    expected = pulled(Springs(), list(range(2 ** (len(names) - 1))))
    for params, placements in runs:
        assert placements == shown
        close(params, expected)
