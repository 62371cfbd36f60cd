"""Does a model train on the values that a user gives its parameters between steps, however that is done, or say so?"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import sherd
from sherd.errors import PlacementError, WriteBackError
from tests.support.comparing import whole_params
from tests.support.models import Block
from tests.support.suites import part
from tests.support.training import assert_trained, made, mean_square, train_job

RATE = 0.2


def stack():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3)).double()


def loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 8, generator=generator, dtype=torch.double)).square().mean()


def fully_sharded(model, **options):
    for block in model[:2]:
        sherd.fully_shard(block, **options)
    return sherd.fully_shard(model, **options)


def over_two_axes(model, strategy):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_sharded(model, mesh=mesh, placements=strategy)


def wrapped(model, use_orig_params):
    for index in range(2):
        model[index] = sherd.FullyShardedDataParallel(model[index], use_orig_params=use_orig_params)
    return sherd.FullyShardedDataParallel(model, use_orig_params=use_orig_params)


STOCK = {
    "Shard(0)": fully_sharded,
    "kept unsharded": partial(fully_sharded, reshard_after_forward=False),
    "zero1": partial(fully_sharded, placements="zero1"),
    "zero2": partial(fully_sharded, placements="zero2"),
    "ddp": partial(fully_sharded, placements="ddp"),
    "hsdp": partial(over_two_axes, strategy="hsdp"),
    "hfsdp": partial(over_two_axes, strategy="hfsdp"),
}
RAGGED = {
    "Flat": partial(fully_sharded, placement=sherd.Flat()),
    "Blocks": partial(fully_sharded, placement=sherd.Blocks(2)),
    "Whole": partial(fully_sharded, placement=sherd.Owned()),
    "wrapper": partial(wrapped, use_orig_params=True),
    "flat parameter": partial(wrapped, use_orig_params=False),
}
WAYS = STOCK | RAGGED


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


GIVEN = [in_place, under_no_grad, into_data, on_the_local_tensor, swapped, whole, filled]


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


def on_a_rank(way, gives):
    trained = [steps(WAYS[way](made(stack)), give, [dist.get_rank()]) for give in gives]
    return [[of_step for (of_step,) in losses] for losses in trained]


def num_ranks(way):
    return 4 if way in ("hsdp", "hfsdp") else 2


@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_given_between_steps_are_trained_on(world, way):
    # Every other one, and the others for the next way.
    gives = part([*GIVEN, assigned] if way in RAGGED else GIVEN, list(WAYS).index(way), 2)
    by_rank = world(num_ranks(way)).run(on_a_rank, way, gives)
    for index, give in enumerate(gives):
        expected = zip(*steps(made(stack), give, range(len(by_rank))), strict=True)
        for found, plain in zip(by_rank, expected, strict=True):
            assert found[index] == pytest.approx(plain, rel=1e-9), give.__name__


# What is lost is said


def read_after_assigning(way, reads):
    return all(one_read_after_assigning(way, read) for read in reads)


def one_read_after_assigning(way, read):
    model = WAYS[way](made(stack))
    loss(model, 0, 0).backward()
    before = whole_params(model)
    assigned(model[0].up.weight)
    with pytest.raises(WriteBackError, match=r"\.data of (0\.)?up\.weight was assigned.*lost.*p\.data\.copy_"):
        read(model)
    read(model)  # once for each assignment
    after = whole_params(model)
    return all(torch.equal(after[name], before[name]) for name in before)


def run_forward(model):
    loss(model, 0, 1)


def run_block(model):
    model[0](torch.ones(1, 8, dtype=torch.double))


def save(model):
    model.state_dict()


def lend(model):
    with sherd.unsharded(model):
        pass


def gather(model):
    model[0].unshard()
    model[0].reshard()


def move(model):
    model.to(torch.device("cpu"))


@pytest.mark.parametrize("way", STOCK)
def test_a_dtensor_assigned_to_one_of_torchs_is_named_where_values_are_read(world, way):
    reads = [run_forward, save, lend, gather, move] if way == "Shard(0)" else [run_forward]
    assert all(world(num_ranks(way)).run(read_after_assigning, way, reads))


def misfit(way):
    """What the next forward says of values that do not fit."""
    model = WAYS[way](made(stack))
    model[2].weight.data = torch.zeros(5, 5, dtype=torch.double)
    with pytest.raises(WriteBackError, match=r"\(5, 5\).*give the whole tensor or this rank's part"):
        loss(model, 0, 0)
    model = WAYS[way](made(stack))
    weight = model[2].weight
    other = distribute_tensor(torch.zeros(3, 8, dtype=torch.double), weight.device_mesh, [Replicate()])
    torch.utils.swap_tensors(weight, nn.Parameter(other))
    with pytest.raises(WriteBackError, match=r"2\.weight was swapped with .* that is not sharded as it is"):
        loss(model, 0, 0)
    return True


@pytest.mark.parametrize("way", ["Shard(0)", "zero2"])
def test_values_that_do_not_fit_are_named(world, way):
    assert all(world(2).run(misfit, way))


def assigned_after_a_load():
    model = fully_sharded(made(stack))
    for give in (assigned, swapped):
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        loss(model, 0, 0).backward()
        weight = model[2].weight
        expected = _whole(weight - RATE * weight.grad).detach()
        give(weight)
        if give is swapped:
            with sherd.unsharded(model):
                torch.testing.assert_close(model[2].weight.detach(), expected)
        else:
            with pytest.raises(WriteBackError, match=r"2\.weight was assigned"):
                model.state_dict()
    return True


def test_so_are_parameters_that_a_load_has_exchanged(world):
    assert all(world(2).run(assigned_after_a_load))


def stepped_after_assigning(way):
    """What an optimizer makes of values given between backward and step, and what it says of those that are lost."""
    model = WAYS[way](made(stack))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss(model, 0, 0).backward()
    weight = model[0].up.weight
    expected = torch.ones(tuple(weight.shape), dtype=torch.double) - RATE * _whole(weight.grad)
    weight.data = torch.ones(tuple(weight.shape), dtype=torch.double)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.double))
    with sherd.unsharded(model):
        torch.testing.assert_close(model[0].up.weight.detach(), expected)
    if way in STOCK:
        assigned_zero = model[0].up.weight
        assigned_zero.data = assigned_zero.data * 0
        with pytest.raises(WriteBackError, match=r"up\.weight was assigned"):
            optimizer.step()
    return True


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"flat parameter"}))
def test_a_step_is_made_on_what_was_given_before_it(world, way):
    assert all(world(num_ranks(way)).run(stepped_after_assigning, way))


def tensor_parallel_assigned():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (None, sherd.Flat()):
        model = made(stack)
        whole_weight = torch.ones(tuple(model[2].weight.shape), dtype=torch.double)
        parallelize_module(model, mesh["tp"], {"2": RowwiseParallel(input_layouts=Replicate())})
        sherd.fully_shard(model, mesh=mesh["dp"], placement=placement)
        model[2].weight.data = whole_weight
        try:
            model(torch.ones(1, 8, dtype=torch.double)).sum().backward()
        except WriteBackError as error:
            assert "2.weight was assigned a tensor of shape (3, 8)" in str(error)  # noqa: PT017
        else:
            model(torch.ones(1, 8, dtype=torch.double)).sum().backward()
            assert torch.equal(_whole(model[2].weight.detach()), whole_weight)
    return True


def test_a_tensor_parallel_parameter_takes_them_or_says_that_it_does_not(world):
    assert all(world(4).run(tensor_parallel_assigned))


def set_memory(ways):
    for way in ways:
        weight, *_ = WAYS[way](made(stack)).parameters()
        with torch.no_grad(), pytest.raises((PlacementError, NotImplementedError), match="set_"):
            weight.set_((weight * 2).detach())
    return True


def test_memory_is_not_exchanged_by_set(world):
    assert all(world(2).run(set_memory, [*RAGGED, "Shard(0)"]))


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
NORM_WAYS = [
    sherd.fully_shard,
    partial(sherd.fully_shard, placement=sherd.Flat()),
    partial(sherd.FullyShardedDataParallel, use_orig_params=True),
]


def train_normed():
    """One rank, so that the vectors that spectral norm goes on with in each forward are those of one process."""
    return [[train_job(way(made(partial(normed, norm))), mean_square) for way in NORM_WAYS] for norm in NORMS]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_norms_of_weights_that_were_set_up_before_train_plainly(world):
    (by_norm,) = world(1).run(train_normed)
    for norm, ways in zip(NORMS, by_norm, strict=True):
        for found in ways:
            assert_trained([found], partial(normed, norm))
