"""Plain parameters with types of the package spmd_types train as in one process, checked by the package in forward and
backward, and as under torch's own FSDP2; what the types do not say is refused on every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import DataParallelMeshDims
from sherd.errors import PlacementError
from tests.support.comparing import assert_same, whole_grads, whole_params
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import refusal
from tests.support.sharding import PLACEMENTS
from tests.support.versions import needs_torch

spmd = pytest.importorskip("spmd_types")
typecheck = pytest.importorskip("spmd_types.checker").typecheck

WIDTH, HIDDEN = 6, 10
STEPS = 2


class Plain(nn.Module):
    """Two layers behind a scale, in one process."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"scale": (WIDTH,), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "bias": (WIDTH,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x):
        return (((x * self.scale) @ self.up.T).tanh() @ self.down.T + self.bias).square().mean()


class Typed(nn.Module):
    """The same over the axis tp: the first layer in columns, the second in rows, typed and checked."""

    def __init__(self, mesh):
        super().__init__()
        names = mesh.mesh_dim_names
        self.tp = spmd.MeshAxis.of(mesh.get_group("tp"))
        self.data = [spmd.MeshAxis.of(mesh.get_group(each)) for each in names if each != "tp"]
        self.seen = {}
        of_tp = {"scale": spmd.R, "up": spmd.S(0), "down": spmd.S(1), "bias": spmd.I}
        for name, whole in Plain().named_parameters():
            kind = of_tp[name]
            dim = {"up": 0, "down": 1}.get(name)
            part = (
                whole.detach()
                if dim is None
                else whole.detach().chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()]
            )
            setattr(self, name, nn.Parameter(part.clone()))
            spmd.assert_type(getattr(self, name), {**dict.fromkeys(self.data, spmd.R), self.tp: kind})

    def forward(self, x):
        for name, each in self.named_parameters():
            self.seen[name] = type(each), tuple(each.shape), dict(spmd.get_local_type(each))
        y = ((x * self.scale) @ self.up.T).tanh() @ self.down.T
        z = spmd.all_reduce(y, self.tp, src=spmd.P, dst=spmd.I) + self.bias
        return z.square().mean()


def mesh_of(*names):
    shape = {"dp": 2, "tp": 2, "replicate": 2}
    return init_device_mesh("cpu", tuple(shape[each] for each in names), mesh_dim_names=names)


def batches(step, num):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num, 3, WIDTH, generator=generator)


def expected(num):
    """Parameters and last gradients of one process that runs all data-parallel batches."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x in batches(step, num):
            (model(x) / num).backward()
        optimizer.step()
    return model


def trained(model, mesh, coordinate, num):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    axes = dict.fromkeys(model.data, spmd.V)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batches(step, num)[coordinate]
        with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict"):
            spmd.assert_type(x, {**axes, model.tp: spmd.R})
            loss = model(x)
            for axis in model.data:
                loss = spmd.reinterpret(loss, axis, src=spmd.V, dst=spmd.P)
            loss.backward()
        optimizer.step()
    return model


@on_processes(4, names=[("dp", "tp"), ("tp", "dp")], front=list(PLACEMENTS))
def test_typed_parameters_train_as_in_one_process_and_are_plain_and_typed_in_forward(names, front):
    mesh = mesh_of(*names)
    model = Typed(mesh)
    dims = DataParallelMeshDims(shard="dp")
    sherd.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, placement=PLACEMENTS[front])
    assert_same(whole_params(model), dict(Plain().named_parameters()))
    trained(model, mesh, mesh["dp"].get_local_rank(), 2)
    plain = expected(2)
    assert_same(whole_params(model), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)
    assert_same(whole_grads(model), {n: p.grad for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)
    (dp,) = model.data
    of_tp = {"scale": spmd.R, "up": spmd.V, "down": spmd.V, "bias": spmd.I}
    shapes = {"scale": (6,), "up": (5, 6), "down": (6, 5), "bias": (6,)}
    assert model.seen == {n: (nn.Parameter, shapes[n], {dp: spmd.R, model.tp: of_tp[n]}) for n in shapes}


@on_processes(4)
def test_typed_parameters_are_seen_copied_and_saved_as_others_that_are_cut_over_tp():
    mesh = mesh_of("dp", "tp")
    model, plain = Typed(mesh), dict(Plain().named_parameters())
    model.up.no_decay = True
    sherd.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert_same(whole_params(copy.deepcopy(model)), plain)
    assert_same({name: each.clone() for name, each in sherd.iter_full_parameters(model)}, plain)
    with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict"):  # of the user's operations, not of sherd's
        for _ in range(2):
            model.unshard()
            model.reshard()
        model.reset_iter_state()
    with sherd.unsharded(model):
        assert (type(model.up), tuple(model.up.shape)) == (nn.Parameter, (5, 6))
        assert spmd.get_local_type(model.up)[model.tp] is spmd.V
        model.up.data.mul_(2)
    assert_same(whole_params(model)["up"], 2 * plain["up"].detach())
    assert model.up.no_decay
    assert not spmd.has_local_type(model.up)  # a file with types could not be read without the package
    assert spmd.get_partition_spec(model.up) is None


def typed(mesh, types, shape=(4, 4), partition=None):
    layer = nn.Linear(*reversed(shape), bias=False)
    groups = {each: mesh.get_group(each) for each in mesh.mesh_dim_names}
    spmd.assert_type(layer.weight, {groups[each]: kind for each, kind in types.items()}, partition)
    return layer


@on_processes(4)
def test_types_that_do_not_say_where_a_parameter_lies_are_refused_on_every_rank():
    mesh, dims = mesh_of("dp", "tp"), DataParallelMeshDims(shard="dp")
    uneven = (3 - dist.get_rank() % 2 * 2, 4)
    axes = {each: spmd.MeshAxis.of(mesh.get_group(each)) for each in mesh.mesh_dim_names}
    layout = {"dp": spmd.R, "tp": spmd.S(0)}
    for options, layer, words in (
        ({"mesh": mesh["dp"]}, typed(mesh, layout), "give fully_shard the full mesh, with names, and dp_mesh_dims"),
        ({}, typed(mesh, layout), "dp_mesh_dims"),
        (None, typed(mesh, {"dp": spmd.I, "tp": spmd.R}), " is I; it must be R"),
        (None, typed(mesh, {"dp": spmd.R, "tp": spmd.V}), "type it R, I or S(dim)"),
        (None, typed(mesh, {"dp": spmd.R, "tp": spmd.P}), "type it R, I or S(dim)"),
        (None, typed(mesh, {"dp": spmd.R}), "no type on the axes ['tp']"),
        (None, typed(mesh, {"tp": spmd.S(0)}), "set_current_mesh"),
        (None, typed(mesh, layout, shape=uneven), "parts of [3, 1]"),
    ):
        options = {"mesh": mesh, "dp_mesh_dims": dims} if options is None else options
        before = layer.weight
        said = refusal(PlacementError, sherd.fully_shard, layer, **options)
        assert "weight: " in said, (words, said)
        assert words in said, (words, said)
        assert layer.weight is before
    both = typed(mesh, {"dp": spmd.V, "tp": spmd.V}, partition=spmd.PartitionSpec((axes["tp"], axes["dp"]), None))
    said = refusal(PlacementError, sherd.fully_shard, both, mesh=mesh, dp_mesh_dims=dims)
    assert "in the order in which they cut" in said, said
    with spmd.set_current_mesh(mesh):  # says which axes a parameter with some types has
        sherd.fully_shard(typed(mesh, {"tp": spmd.S(0)}), mesh=mesh, dp_mesh_dims=dims)


@needs_torch(2, 14, "FSDP2 takes typed parameters")
@on_processes(4)
def test_typed_parameters_train_as_under_torch():
    from torch.distributed.fsdp import DataParallelMeshDims as TheirDims
    from torch.distributed.fsdp import fully_shard as torch_shards

    mesh = mesh_of("dp", "tp")
    ours, theirs = Typed(mesh), Typed(mesh)
    sherd.fully_shard(ours, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    torch_shards(theirs, mesh=mesh, dp_mesh_dims=TheirDims(shard="dp"))
    for model in (ours, theirs):
        trained(model, mesh, mesh["dp"].get_local_rank(), 2)
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.device_mesh, mine.placements) == (their.device_mesh, their.placements), name
        assert_same(mine.to_local(), their.to_local().detach(), name, rtol=1e-6, atol=1e-7)
    assert ours.seen == theirs.seen
