"""Does every argument of `fully_shard`, and what it makes of a module, mean what it says?"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import sherd
from sherd import DataParallelMeshDims, FSDPModule, fully_shard
from tests.support.comparing import form, whole_grads
from tests.support.models import WIDTH, Block, build, noise, shard
from tests.support.training import (
    LR,
    Recipe,
    assert_all_same,
    made,
    mean_square,
    steps_sharded,
    train_job,
    train_job_plain,
)
from tests.support.versions import needs_torch


def stack():
    return nn.Sequential(Block(), Block(), Block())


# The class


class Plus(nn.Sequential):
    """A Sequential with an attribute, a method and a property of its own."""

    rate = 3

    @property
    def doubled(self):
        return 2 * self.rate

    def plus(self, x):
        return x + self.rate


def classes():
    model, other, block = Plus(Block(), nn.Tanh(), Block()), Plus(Block()), Block()
    for each in (model[0], model[2], other, block):
        assert fully_shard(each) is each
    assert fully_shard.state(model) is None
    fully_shard(model)
    assert type(model).__name__ == "FSDPPlus"
    assert type(model) is type(other)
    assert type(model[0]) is type(block)
    assert isinstance(model, Plus)
    assert isinstance(model, FSDPModule)
    assert issubclass(type(model), nn.Sequential)
    assert type(model).__module__ == Plus.__module__
    assert (model.rate, model.doubled, model.plus(1)) == (3, 6, 4)
    assert len(model) == 3
    assert model[2] is list(model)[2]
    part = model[:2]
    assert type(part) is Plus
    assert part[0] is model[0]
    assert not isinstance(model[1], FSDPModule)
    assert "FSDPPlus" in repr(model)
    assert type(type(model)()) is Plus


def test_a_sharded_module_is_still_of_its_own_class(world):
    world(2).run(classes)


def states():
    model = shard(build("list_unit"))
    assert fully_shard.state(model.block.up) is None
    assert fully_shard.state(model.norm) is fully_shard.state(model.head) is not None
    assert fully_shard.state(model.block) is not fully_shard.state(model)
    assert fully_shard.state(nn.Linear(1, 1)) is None
    assert "Block" in repr(fully_shard.state(model.block))


def test_the_state_of_a_module_is_its_unit_or_none(world):
    world(1).run(states)


def list_in_list_out():
    first, second = Block(), Block()
    result = fully_shard([first, second])
    assert isinstance(result, list)
    assert result[0] is first
    assert result[1] is second
    assert isinstance(second, FSDPModule)


def test_a_list_of_modules_comes_back_as_it_went_in(world):
    world(1).run(list_in_list_out)


class Bank(nn.Linear):
    """It has a length, of nothing yet."""

    def __len__(self):
        return 0


def shard_what_has_odd_lengths(kind):
    # A compiled module has a `__len__` that raises.
    model = nn.Sequential(Bank(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"), nn.Sequential())
    model = fully_shard(model) if kind == "fully_shard" else sherd.FullyShardedDataParallel(model, use_orig_params=True)
    return [name for name, param in model.named_parameters() if isinstance(param, DTensor)]


@pytest.mark.parametrize("kind", ["fully_shard", "wrapper"])
def test_the_length_of_a_module_does_not_matter(threads, kind):
    names = ["0.weight", "0.bias", "1._orig_mod.weight", "1._orig_mod.bias"]
    assert threads(2).run(shard_what_has_odd_lengths, kind) == [names, names]


# ignored_params


def ignore_the_first_layer(model):
    return {*model[0].parameters()}


def train_with_ignored():
    model = made(stack)
    ignored = ignore_the_first_layer(model)
    before = {id(param) for param in ignored}
    fully_shard(model[1], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert {id(param) for param in model[0].parameters()} == before
    assert not any(isinstance(param, DTensor) for param in model[0].parameters())
    assert all(isinstance(param, DTensor) for param in [*model[1].parameters(), *model[2].parameters()])
    mean_square(model, dist.get_rank(), 0).backward()
    own = {name: param.grad for name, param in model[0].named_parameters()}
    return own, {name: param.grad.full_tensor() for name, param in model[2].named_parameters()}


def test_ignored_parameters_stay_plain_and_keep_their_ranks_own_gradient(world):
    plain = [made(stack) for _ in range(2)]
    for rank, model in enumerate(plain):
        mean_square(model, rank, 0).backward()
    for rank, (own, reduced) in enumerate(world(2).run(train_with_ignored)):
        for name, param in plain[rank][0].named_parameters():
            torch.testing.assert_close(own[name], param.grad)
        for name, grad in reduced.items():
            mean = sum(model[2].get_parameter(name).grad for model in plain) / 2
            torch.testing.assert_close(grad, mean)


def everything_ignored():
    model = made(stack)
    fully_shard(model, ignored_params=set(model.parameters()))
    return train_job(model, lambda model, rank, step: mean_square(model, 0, step))


def test_a_unit_of_which_everything_is_ignored_does_nothing(world):
    expected = train_job_plain(made(stack), mean_square, 1)
    for params in world(2).run(everything_ignored):
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name])


def trained_beside_ddp(kind, models):
    model = models[dist.get_rank()]
    replicate(model[0])
    before = list(model[0].parameters())
    if kind == "fully_shard":
        fully_shard(model[2])
        fully_shard(model)
    else:
        model = sherd.FullyShardedDataParallel(model, use_orig_params=True)
    assert [*model[0].parameters()] == before
    assert all(isinstance(param, DTensor) for each in (model[1], model[2]) for param in each.parameters())
    mean_square(model, dist.get_rank(), 0).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


@pytest.mark.parametrize("kind", ["fully_shard", "wrapper"])
def test_a_module_that_torchs_ddp_looks_after_is_left_to_it(threads, kind):
    plain = [made(stack) for _ in range(2)]
    for rank, model in enumerate(plain):
        mean_square(model, rank, 0).backward()
    for grads in threads(2).run(trained_beside_ddp, kind, [made(stack) for _ in range(2)]):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, sum(model.get_parameter(name).grad for model in plain) / 2)


# mesh and dp_mesh_dims


def mesh_2x2(*names):
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def train_on_a_named_axis(recipe):
    """The 4 ranks are 2 data-parallel ones, twice."""
    mesh = mesh_2x2("data", "rest")
    model = shard(build(recipe.model), mesh=mesh["data"])
    return steps_sharded(model, recipe, mesh.get_local_rank("data"))


def test_a_submesh_picked_by_name_shards_over_that_axis(world):
    recipe = Recipe("mlp", steps=2)
    runs = world(4).run(train_on_a_named_axis, recipe)
    assert_all_same(runs[:1] + runs[2:3], recipe)
    assert_all_same(runs[1:2] + runs[3:], recipe)


def train_on_named_replicas(recipe, dims):
    mesh = mesh_2x2("shards", "copies")
    model = shard(build(recipe.model), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    mesh_of_weight = model.blocks[0].up.weight.device_mesh
    run = steps_sharded(model, recipe, dist.get_rank())
    return run, tuple(model.blocks[0].up.weight.to_local().shape), mesh_of_weight.mesh_dim_names


def test_named_axes_say_which_one_shards_and_which_one_replicates(world):
    recipe = Recipe("mlp", steps=2)
    runs = world(4).run(train_on_named_replicas, recipe, {"shard": "shards", "replicate": "copies"})
    assert_all_same([run for run, _, _ in runs], recipe)
    assert {shape for _, shape, _ in runs} == {(WIDTH, WIDTH)}


class TensorParallel(nn.Module):
    """Two linear layers whose weights are DTensors on a (dp, tp) mesh: columns first, then rows."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mesh = None

    def cut(self, mesh):
        self.mesh = mesh
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(dim)]))
        return self

    def forward(self, x):
        if self.mesh is None:
            return self.down(torch.tanh(self.up(x)))
        x = DTensor.from_local(x, self.mesh, [Shard(0), Replicate()], run_check=False)
        y = F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)
        # Times one: torch's FSDP warns about outputs that are views. `test_odd_use` holds sherd to views.
        return y.redistribute(self.mesh, [Shard(0), Replicate()]).to_local() * 1


def train_tensor_parallel(name, shard_fn):
    """Gradients of the first step, parameters after three; with the library called `name`."""
    library = {"sherd": sherd, "torch": fsdp}[name]
    mesh = mesh_2x2("dp", "tp")
    model = made(TensorParallel).cut(mesh)
    dims = library.DataParallelMeshDims(shard="dp")
    library.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=shard_fn)
    optimizer, grads = torch.optim.SGD(model.parameters(), lr=LR), {}
    for step in range(3):
        mean_square(model, mesh.get_local_rank("dp"), step).backward()
        grads = grads or {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    return grads, params, [tuple(param.to_local().shape) for param in model.parameters()]


def on_dim_1(param):
    return Shard(1)


@pytest.mark.parametrize("shard_fn", [None, on_dim_1], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "library", ["sherd", pytest.param("torch", marks=needs_torch(2, 12, "its FSDP has no DataParallelMeshDims"))]
)
def test_dtensors_of_a_larger_mesh_are_sharded_over_the_named_axis(world, library, shard_fn):
    runs = world(4).run(train_tensor_parallel, library, shard_fn)
    plain = made(TensorParallel)
    for rank in range(2):
        (mean_square(plain, rank, 0) / 2).backward()
    expected = train_job_plain(made(TensorParallel), mean_square, 2)
    for grads, params, shapes in runs:
        assert sum(rows * columns for rows, columns in shapes) * 4 == 2 * 2 * WIDTH * WIDTH
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(params[name], expected[name], rtol=1e-5, atol=1e-6)


def train_tensor_parallel_beside():
    """The usual way: weights are DTensors on the tp axis alone, the model is sharded over the dp axis."""
    mesh = mesh_2x2("dp", "tp")
    model = made(TensorParallel)
    for layer, dim in ((model.up, 0), (model.down, 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(dim)]))
    fully_shard(model, mesh=mesh["dp"])
    model.forward = lambda x: forward_on_one_axis(model, mesh["tp"], x)
    return train_job(model, lambda model, rank, step: mean_square(model, mesh.get_local_rank("dp"), step))


def forward_on_one_axis(model, mesh, x):
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    y = F.linear(torch.tanh(F.linear(x, model.up.weight)), model.down.weight)
    return y.redistribute(mesh, [Replicate()]).to_local() * 1


def test_dtensors_of_one_axis_are_sharded_over_the_other(world):
    expected = train_job_plain(made(TensorParallel), mean_square, 2)
    for params in world(4).run(train_tensor_parallel_beside):
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-6)


# Lists of modules


class Chunked(nn.Module):
    """A head that runs once per chunk of a long sequence, its norm once in all: a chunked loss."""

    def __init__(self):
        super().__init__()
        self.body = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        hidden = self.norm(self.body(x))
        return torch.cat([self.head(chunk) for chunk in hidden.chunk(3)])


class Partial(Chunked):
    """The head runs on odd steps only."""

    def forward(self, x, with_head):
        hidden = self.norm(self.body(x))
        return self.head(hidden) if with_head else hidden


def read_partly(model, rank, step):
    return model(noise(step, rank), step % 2 == 1).square().mean()


def train_with_list_units(make, job, reshard):
    model = made(make)
    fully_shard(model.body)
    fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    fully_shard(model)
    params = train_job(model, job, steps=4)
    assert {form(model.norm), form(model.head)} == {"shard"}
    return params


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("make", "job"), [(Chunked, mean_square), (Partial, read_partly)])
def test_modules_of_one_unit_may_run_several_times_or_not_at_all(world, make, job, reshard):
    expected = train_job_plain(made(make), job, 2, steps=4)
    for params in world(2).run(train_with_list_units, make, job, reshard):
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-6)


def loss_in_chunks(model, rank):
    """The head's backward runs chunk by chunk, apart from the body's."""
    hidden = model.norm(model.body(noise(0, rank)))
    apart = hidden.detach().requires_grad_()
    for chunk in apart.chunk(3):
        model.head(chunk).square().sum().backward()
    hidden.backward(apart.grad)


def chunked_grads():
    model = made(Chunked)
    for unit in (model.body, model.norm, model.head):
        fully_shard(unit)
    loss_in_chunks(model, dist.get_rank())
    return whole_grads(model)


def test_a_loss_may_go_backward_chunk_by_chunk(world):
    plain = made(Chunked)
    for rank in range(2):
        loss_in_chunks(plain, rank)
    for grads in world(2).run(chunked_grads):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad / 2, rtol=1e-5, atol=1e-6)
