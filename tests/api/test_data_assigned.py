"""A model trains on the values that a user gives its parameters between steps, however that is done."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import sherd
from sherd.errors import PlacementError, WriteBackError
from tests.api.checks import assert_trains, named_mesh
from tests.support.comparing import assert_same
from tests.support.models import Block
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import FRONTS, sharded
from tests.support.suites import part
from tests.support.training import made

RATE = 0.2


def stack():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3)).double()


def loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 8, generator=generator, dtype=torch.double)).square().mean()


def both_blocks(model, front="shard", **options):
    return sharded(model, front, [model[0], model[1], model], **options)


def over_two_axes(model, strategy):
    mesh = named_mesh((2, dist.get_world_size() // 2), "replicate", "shard")
    return both_blocks(model, mesh=mesh, placements=strategy)


STOCK = {
    "shard": both_blocks,
    "kept unsharded": partial(both_blocks, reshard_after_forward=False),
    "zero1": partial(both_blocks, placements="zero1"),
    "zero2": partial(both_blocks, placements="zero2"),
    "ddp": partial(both_blocks, placements="ddp"),
    "hsdp": partial(over_two_axes, strategy="hsdp"),
    "hfsdp": partial(over_two_axes, strategy="hfsdp"),
}
RAGGED = {front: partial(both_blocks, front=front) for front in FRONTS if front != "shard"}
WAYS = STOCK | RAGGED


def each_of(ways):
    return pytest.mark.parametrize(("way", "num_ranks"), [(way, 4 if way in ("hsdp", "hfsdp") else 2) for way in ways])


# Ways to give a parameter new values: each does one step of SGD


def in_place(weight):
    weight.data -= RATE * weight.grad


def under_no_grad(weight):
    with torch.no_grad():
        weight.copy_(weight - RATE * weight.grad)


def into_data(weight):
    weight.data.copy_(weight.data - RATE * weight.grad)


def on_the_local_tensor(weight):
    local = isinstance(weight, DTensor)
    (weight.to_local().data if local else weight.data).sub_((weight.grad.to_local() if local else weight.grad) * RATE)


def swapped(weight):
    other = nn.Parameter(weight.data - RATE * weight.grad)
    weight.grad = None
    torch.utils.swap_tensors(weight, other)


def whole(weight):
    weight.data = _whole(weight).detach() - RATE * _whole(weight.grad)


def assigned(weight):
    weight.data = weight.data - RATE * weight.grad


def filled(weight):
    nn.init.constant_(weight, 0.1)
    nn.init.ones_(weight.grad)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


GIVEN = [in_place, under_no_grad, into_data, on_the_local_tensor, swapped, whole, filled, assigned]


def steps(model, give, ranks):
    losses = []
    for step in range(3):
        found = [loss(model, rank, step) for rank in ranks]
        losses.append([each.item() for each in found])
        (sum(found) / len(found)).backward()
        for weight in model.parameters():
            give(weight)
        model.zero_grad()
    return losses


@each_of(WAYS)
@on_threads()
def test_values_that_are_given_between_steps_are_trained_on(way):
    # Every other one, and the others for the next way.
    for give in part(GIVEN, list(WAYS).index(way), 2):
        found = steps(WAYS[way](made(stack)), give, [dist.get_rank()])
        by_rank = steps(made(stack), give, range(dist.get_world_size()))
        expected = [[losses[dist.get_rank()]] for losses in by_rank]
        assert_same(found, expected, give.__name__, rtol=1e-9)


# Who reads them


def lent(model):
    with sherd.unsharded(model):
        return model[0].up.weight.detach().clone()


def saved(model):
    return _whole(model.state_dict()[next(name for name in model.state_dict() if name.endswith("0.up.weight"))])


@each_of(STOCK)
@on_threads()
def test_a_dtensor_that_is_assigned_is_read_at_once(way):
    for read in (lent, saved):
        model = WAYS[way](made(stack))
        loss(model, 0, 0).backward()
        weight = model[0].up.weight
        expected = _whole(weight - RATE * weight.grad).detach()
        assigned(weight)
        torch.testing.assert_close(read(model), expected)


@on_threads(2)
def test_values_that_do_not_fit_are_named():
    for way in ("shard", "zero2"):
        model = WAYS[way](made(stack))
        with pytest.raises(WriteBackError, match=r"\(5, 5\).*give the full tensor or this rank's part"):
            model[2].weight.data = torch.zeros(5, 5, dtype=torch.double)
        weight = model[2].weight
        other = distribute_tensor(torch.zeros(3, 8, dtype=torch.double), weight.device_mesh, [Replicate()])
        torch.utils.swap_tensors(weight, nn.Parameter(other))
        with pytest.raises(WriteBackError, match=r"2\.weight was swapped with .* that is not sharded as it is"):
            loss(model, 0, 0)


@on_threads(2)
def test_parameters_that_a_load_has_exchanged_take_them_too():
    """Also those that a file gave as DTensors of torch."""
    model = both_blocks(made(stack))
    for give in (assigned, swapped):
        state = {name: as_of_torch(each) for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        loss(model, 0, 0).backward()
        weight = model[2].weight
        expected = _whole(weight - RATE * weight.grad).detach()
        give(weight)
        with sherd.unsharded(model):
            torch.testing.assert_close(model[2].weight.detach(), expected)


def as_of_torch(shard):
    local = shard.to_local().clone()
    return DTensor.from_local(local, shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride())


@each_of(sorted(WAYS.keys() - {"flat wrapper"}))
@on_threads()
def test_a_step_is_made_on_what_was_given_before_it(way):
    model = WAYS[way](made(stack))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss(model, 0, 0).backward()
    weight = model[0].up.weight
    ones = torch.ones(tuple(weight.shape), dtype=torch.double)
    expected = ones - RATE * _whole(weight.grad)
    weight.data = ones
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.double))
    with sherd.unsharded(model):
        torch.testing.assert_close(model[0].up.weight.detach(), expected)


@on_threads(4)
def test_a_tensor_parallel_parameter_takes_them():
    mesh = named_mesh((2, 2), "dp", "tp")
    for placement in (None, sherd.Flat()):
        model = made(stack)
        whole_weight = torch.randn(tuple(model[2].weight.shape), dtype=torch.double)
        parallelize_module(model, mesh["tp"], {"2": RowwiseParallel(input_layouts=Replicate())})
        sherd.fully_shard(model, mesh=mesh["dp"], placement=placement)
        model[2].weight.data = whole_weight
        model(torch.ones(1, 8, dtype=torch.double)).sum().backward()
        assert torch.equal(_whole(model[2].weight.detach()), whole_weight)


@on_threads(2)
def test_memory_is_not_exchanged_by_set():
    for way in (*RAGGED, "shard"):
        weight, *_ = WAYS[way](made(stack)).parameters()
        with torch.no_grad(), pytest.raises((PlacementError, NotImplementedError), match="set_"):
            weight.set_((weight * 2).detach())


# What writes into parameters by itself


def normed(norm):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        norm(layer)
    return model


NORMS = [
    nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.spectral_norm,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@on_threads(1)
def test_norms_of_weights_that_were_set_up_before_train_plainly():
    """One rank, so that the vectors that spectral norm goes on with in each forward are those of one process."""
    for norm in NORMS:
        make = partial(normed, norm)
        for front in ("shard", "flat", "wrapper"):
            model = made(make)
            assert_trains(sharded(model, front, [model]), make)
