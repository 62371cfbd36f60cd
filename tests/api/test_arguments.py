"""Every argument of `fully_shard`, and what it makes of a module, means what it says."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sherd
from sherd import Blocks, DataParallelMeshDims, Flat, FSDPModule, Owned, fully_shard
from tests.api.checks import assert_trains, named_mesh
from tests.support.comparing import assert_named_close, form, whole_grads
from tests.support.models import WIDTH, Block, Wired, build, chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import (
    Recipe,
    assert_same_run,
    made,
    mean_square,
    steps_sharded,
    train_job,
    train_job_plain,
    train_plain,
)
from tests.support.versions import needs_torch

# The class


class Plus(nn.Sequential):
    """A Sequential with an attribute, a method and a property of its own."""

    rate = 3

    @property
    def doubled(self):
        return 2 * self.rate

    def plus(self, x):
        return x + self.rate


@on_threads(2)
def test_a_sharded_module_is_still_of_its_own_class():
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


@on_threads(1)
def test_the_state_of_a_module_is_its_unit_or_none():
    model = sharded(build("list_unit"))
    assert fully_shard.state(model.block.up) is None
    assert fully_shard.state(model.norm) is fully_shard.state(model.head) is not None
    assert fully_shard.state(model.block) is not fully_shard.state(model)
    assert fully_shard.state(nn.Linear(1, 1)) is None
    assert "Block" in repr(fully_shard.state(model.block))


@on_threads(1)
def test_a_list_of_modules_comes_back_as_it_went_in():
    first, second = Block(), Block()
    result = fully_shard([first, second])
    assert isinstance(result, list)
    assert result[0] is first
    assert result[1] is second
    assert isinstance(second, FSDPModule)


class Bank(nn.Linear):
    """It has a length, of nothing yet."""

    def __len__(self):
        return 0


@on_threads(2)
def test_the_length_of_a_module_does_not_matter():
    for shard in (fully_shard, partial(sherd.FullyShardedDataParallel, use_orig_params=True)):
        # A compiled module has a `__len__` that raises.
        model = shard(nn.Sequential(Bank(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"), nn.Sequential()))
        names = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        assert names == ["0.weight", "0.bias", "1._orig_mod.weight", "1._orig_mod.bias"]


# ignored_params


def grads_of_ranks():
    """By name, the gradient of each rank's batch in a plain model of three blocks."""
    models = [chain(3), chain(3)]
    for rank, model in enumerate(models):
        mean_square(model, rank, 0).backward()
    return [whole_grads(model) for model in models]


@on_threads(2)
def test_ignored_parameters_stay_plain_and_keep_their_ranks_own_gradient():
    """Those of a whole block, and one of a unit."""
    rank, by_rank = dist.get_rank(), grads_of_ranks()
    for placement in (None, Flat(), Blocks(1), Owned()):
        model = chain(3)
        before = {name: each for name, each in model.named_parameters() if name.startswith("0.") or name == "1.up.bias"}
        for unit in (model[1], model):
            fully_shard(unit, ignored_params=set(before.values()), placement=placement)
        mean_square(model, rank, 0).backward()
        for name, param in model.named_parameters():
            if name in before:
                assert param is before[name]
                torch.testing.assert_close(param.grad, by_rank[rank][name])
            else:
                assert isinstance(param, DTensor)
                mean = (by_rank[0][name] + by_rank[1][name]) / 2
                torch.testing.assert_close(param.grad.full_tensor(), mean)


@on_threads(2)
def test_a_unit_of_which_everything_is_ignored_does_nothing():
    model, plain = chain(3), chain(3)
    fully_shard(model, ignored_params=set(model.parameters()))
    found = train_job(model, lambda model, rank, step: mean_square(model, 0, step))
    assert_named_close(found, train_job_plain(plain, mean_square, 1), "parameter", 1e-5, 1e-6)


@pytest.mark.parametrize("front", ["shard", "wrapper"])
@on_threads(2)
def test_a_module_that_torchs_ddp_looks_after_is_left_to_it(front):
    model = chain(3)
    replicate(model[0])
    before = list(model[0].parameters())
    model = sharded(model, front, [model[2], model] if front == "shard" else [model])
    assert [*model[0].parameters()] == before
    assert all(isinstance(param, DTensor) for each in (model[1], model[2]) for param in each.parameters())
    mean_square(model, dist.get_rank(), 0).backward()
    first, second = grads_of_ranks()
    for name, grad in whole_grads(model).items():
        torch.testing.assert_close(grad, (first[name] + second[name]) / 2)


# mesh and dp_mesh_dims


@on_threads(4)
def test_a_submesh_picked_by_name_shards_over_that_axis():
    """The 4 ranks are 2 data-parallel ones, twice."""
    mesh, recipe = named_mesh((2, 2), "data", "rest"), Recipe("mlp")
    rank = mesh.get_local_rank("data")
    assert_same_run(steps_sharded(sharded(build("mlp"), mesh=mesh["data"]), recipe, rank), train_plain(recipe, 2)[rank])


@on_threads(4)
def test_named_axes_say_which_one_shards_and_which_one_replicates():
    dims, mesh = DataParallelMeshDims(shard="shards", replicate="copies"), named_mesh((2, 2), "shards", "copies")
    for options, rows in (({}, WIDTH), ({"replicate_below": 100}, WIDTH), ({"placements": "ddp"}, 2 * WIDTH)):
        model = sharded(build("mlp"), mesh=mesh, dp_mesh_dims=dims, **options)
        assert tuple(model.blocks[0].up.weight.to_local().shape) == (rows, WIDTH)
        assert_trains(model, partial(build, "mlp"))


class TensorParallel(nn.Module):
    """Two linear layers whose weights are DTensors on a (dp, tp) mesh: columns first, then rows."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mesh = None

    def cut(self, mesh, *batch):
        """On a mesh of the tp axis, behind that of the `batch` if there is one, with its placement."""
        self.mesh, self.batch = mesh, batch
        for layer, dim in ((self.up, 0), (self.down, 1)):
            placements = [*(Replicate() for _ in batch), Shard(dim)]
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
        return self

    def forward(self, x):
        if self.mesh is None:
            return self.down(torch.tanh(self.up(x)))
        x = DTensor.from_local(x, self.mesh, [*self.batch, Replicate()], run_check=False)
        y = F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)
        # Times one: torch's FSDP warns about outputs that are views. `test_odd_calls` holds sherd to views.
        return y.redistribute(self.mesh, [*self.batch, Replicate()]).to_local() * 1


def assert_trains_over(mesh, model):
    """As in one process, on one batch for each rank of the dp axis."""
    found = train_job(model, lambda model, _, step: mean_square(model, mesh.get_local_rank("dp"), step))
    expected = train_job_plain(made(TensorParallel), mean_square, 2)
    assert_named_close(found, expected, "parameter", 1e-5, 1e-6)


@pytest.mark.parametrize("shard_fn", [None, lambda param: Shard(1)], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "library", [sherd, pytest.param(fsdp, marks=needs_torch(2, 12, "its FSDP has no DataParallelMeshDims"))]
)
@on_threads(4)
def test_dtensors_of_a_larger_mesh_are_sharded_over_the_named_axis(library, shard_fn):
    mesh = named_mesh((2, 2), "dp", "tp")
    model = made(TensorParallel).cut(mesh, Shard(0))
    dims = library.DataParallelMeshDims(shard="dp")
    library.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=shard_fn)
    assert sum(param.to_local().numel() for param in model.parameters()) * 4 == 2 * 2 * WIDTH * WIDTH
    plain = made(TensorParallel)
    for rank in range(2):
        (mean_square(plain, rank, 0) / 2).backward()
    mean_square(model, mesh.get_local_rank("dp"), 0).backward()
    assert_named_close(whole_grads(model), whole_grads(plain), "gradient", 1e-5, 1e-6)
    model.zero_grad()
    assert_trains_over(mesh, model)


@on_threads(4)
def test_dtensors_of_one_axis_are_sharded_over_the_other():
    """The usual way: weights are DTensors on the tp axis alone, the model is sharded over the dp axis."""
    mesh = named_mesh((2, 2), "dp", "tp")
    assert_trains_over(mesh, fully_shard(made(TensorParallel).cut(mesh["tp"]), mesh=mesh["dp"]))


# Lists of modules


def headed(run):
    return Wired(run, body=Block(), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 3))


def chunked():
    """A head that runs once per chunk of a long sequence, its norm once in all: a chunked loss."""
    return headed(lambda self, x: torch.cat([self.head(chunk) for chunk in self.norm(self.body(x)).chunk(3)]))


def at_times():
    """The head runs on odd steps only."""
    return headed(lambda self, x, with_head: (self.head if with_head else nn.Identity())(self.norm(self.body(x))))


def read_partly(model, rank, step):
    return model(noise(step, rank), step % 2 == 1).square().mean()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("make", "job"), [(chunked, mean_square), (at_times, read_partly)])
@on_threads(2)
def test_modules_of_one_unit_may_run_several_times_or_not_at_all(make, job, reshard):
    model = made(make)
    fully_shard(model.body)
    fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    assert_trains(fully_shard(model), make, job, steps=4)
    assert {form(model.norm), form(model.head)} == {"shard"}


def loss_in_chunks(model, rank):
    """The head's backward runs chunk by chunk, apart from the body's."""
    hidden = model.norm(model.body(noise(0, rank)))
    apart = hidden.detach().requires_grad_()
    for chunk in apart.chunk(3):
        model.head(chunk).square().sum().backward()
    hidden.backward(apart.grad)


@on_threads(2)
def test_a_loss_may_go_backward_chunk_by_chunk():
    model, plain = made(chunked), made(chunked)
    for unit in (model.body, model.norm, model.head):
        fully_shard(unit)
    loss_in_chunks(model, dist.get_rank())
    for rank in range(2):
        loss_in_chunks(plain, rank)
    for name, grad in whole_grads(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad / 2, rtol=1e-5, atol=1e-6)
