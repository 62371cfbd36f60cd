"""Parameters on one mesh of all axes, of which `DataParallelMeshDims` names the data-parallel ones."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from sherd import DataParallelMeshDims, fully_shard, replicate
from tests.conformance.newer.behaviours import (
    MLP,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    raises,
    rank,
    same,
    same_models,
)


def cut_for_tensor_parallel(name, module, mesh):
    if isinstance(module, nn.Linear):
        for kind, p in list(module.named_parameters(recurse=False)):
            last = Replicate() if kind == "bias" else Shard(0) if "in_proj" in name else Shard(1)
            module.register_parameter(
                kind, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()] * (mesh.ndim - 1) + [last]))
            )


def other_dim(p):
    return Shard(1) if any(isinstance(x, Shard) and x.dim == 0 for x in p.placements) else Shard(0)


def trains(shape, names, *, tp=False, reshard=True, replicated=False, **dims):
    dims = DataParallelMeshDims(**dims)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = MLP(16)
    model = copy.deepcopy(plain)
    distribute_module(model, mesh, cut_for_tensor_parallel if tp else None)
    if replicated:
        replicate(model, mesh=mesh, dp_mesh_dims=dims)
    else:
        fully_shard(
            model,
            mesh=mesh,
            reshard_after_forward=reshard,
            dp_mesh_dims=dims,
            shard_placement_fn=other_dim if tp else None,
        )
    seed = rank() // shape[-1] if tp else rank()  # ranks of one tensor-parallel group have one batch
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, foreach=False) for m in (model, plain)]
    for i in range(2):
        x = batch(2, 16, seed=10 * i + seed, each_rank=False)
        plain(x).square().sum().backward()
        y = model(DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False))
        y = y.full_tensor() if isinstance(y, DTensor) else y
        y.square().sum().backward()
        averaged(plain)
        for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            same(got.grad, want.grad, name + ".grad", 1e-4)
        for o in optimizers:
            o.step(), o.zero_grad()
    same_models(model, plain, grads=False, tol=1e-4)


cases(
    2,
    one_axis_sharded=lambda: trains((2,), ("fsdp",), shard="fsdp"),
    one_axis_sharded_and_kept=lambda: trains((2,), ("fsdp",), shard="fsdp", reshard=False),
    one_axis_replicated=lambda: trains((2,), ("ddp",), replicate="ddp"),
    one_axis_by_replicate=lambda: trains((2,), ("ddp",), replicate="ddp", replicated=True),
)


cases(
    4,
    replicas_and_shards=lambda: trains((2, 2), ("rep", "shard"), shard="shard", replicate="rep"),
    two_shard_axes=lambda: trains((2, 2), ("dp0", "dp1"), shard=("dp0", "dp1")),
    shards_and_tensor_parallel=lambda: trains((2, 2), ("fsdp", "tp"), shard="fsdp", tp=True),
    shards_and_tensor_parallel_kept=lambda: trains((2, 2), ("fsdp", "tp"), shard="fsdp", tp=True, reshard=False),
    replicas_shards_and_tensor_parallel=lambda: trains(
        (1, 2, 2), ("rep", "fsdp", "tp"), shard="fsdp", replicate="rep", tp=True
    ),
    two_replicate_axes=lambda: trains((1, 2, 2), ("r0", "r1", "fsdp"), shard="fsdp", replicate=("r0", "r1")),
)


@behaviour(2)
def shards_keep_the_mesh_of_one_axis():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = MLP(16)
    distribute_module(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
    for p in model.parameters():
        equal((isinstance(p, DTensor), p.device_mesh), (True, mesh), "mesh")
        equal([type(each) for each in p.placements], [Shard], "placements")


@behaviour(4)
def shards_keep_the_mesh_of_all_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = MLP(16)
    distribute_module(model, mesh, cut_for_tensor_parallel)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"), shard_placement_fn=other_dim)
    want = {"in_proj.weight": (1, 0), "out_proj.weight": (0, 1), "in_proj.bias": (0, None), "out_proj.bias": (0, None)}
    for name, p in model.named_parameters():
        equal(p.device_mesh, mesh, name)
        equal(tuple(x.dim if isinstance(x, Shard) else None for x in p.placements), want[name], name)


@behaviour(2)
def a_parameter_sharded_on_a_data_parallel_axis_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = nn.Linear(16, 32, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    raises(
        ValueError,
        lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp")),
        "Shard(0) on the axis of FSDP",
    )


@behaviour(2)
def an_axis_that_does_not_exist_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = MLP(16)
    distribute_module(model, mesh)
    raises(
        ValueError,
        lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="nothing")),
        "an unknown axis",
    )


@behaviour(4)
def a_parameter_on_another_mesh_is_refused():
    model = nn.Linear(16, 32, bias=False)
    one, other = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("fsdp", "tp"), ("a", "b")))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), one, [Replicate(), Shard(0)]))
    raises(
        ValueError,
        lambda: fully_shard(model, mesh=other, dp_mesh_dims=DataParallelMeshDims(shard="a")),
        "a parameter of another mesh",
    )


@behaviour(1)
def no_axis_at_all_is_refused():
    raises(ValueError, DataParallelMeshDims, "DataParallelMeshDims()")
