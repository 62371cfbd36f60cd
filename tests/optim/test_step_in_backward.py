"""Does a unit that is stepped within backward train as one that is stepped after it?"""

import contextlib

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams
from sherd.errors import ModuleError, OptimizerError, PolicyTypeError
from tests.support.ranks import RanksFailed

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}
STREAMS = {"host": HostStreams, "streams": RecordingStreams}


class Net(nn.Module):
    """Blocks with an output that the last one has not: `outside` belongs to no unit."""

    def __init__(self, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.recompute) if self.recompute is not None else block(x))
        return self.head(x)


def made(recompute=None):
    torch.manual_seed(0)
    return Net(recompute)


def batch(step, micro=0):
    seed = 100 * dist.get_rank() + 10 * step + micro
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def sharded(streams, recompute=None, placement=None):
    model = made(recompute)
    with use_streams(STREAMS[streams]()):
        for block in model.blocks:
            sherd.fully_shard(block, placement=placement)
        return sherd.fully_shard(model, placement=placement)


def trained(optimizer, in_backward, streams="host", placement=None, micro=1, recompute=None):
    """The parameters after three steps, and the gradients that are there when backward is over."""
    model = sharded(streams, recompute, placement)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    left = []
    for step in range(3):
        with sherd.accumulate(model, micro) if micro > 1 else contextlib.nullcontext():
            for number in range(micro):
                model(batch(step, number)).square().mean().backward()
        left.append(sum(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()], left


@pytest.mark.pairs
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["shard", "flat"])
def test_the_parameters_are_those_of_steps_after_backward_and_no_gradient_is_left(world, streams, optimizer, placement):
    expected, kept = world(2).run(trained, optimizer, False, streams, placement)[0]
    found, left = world(2).run(trained, optimizer, True, streams, placement)[0]
    assert (kept, left) == ([14] * 3, [0] * 3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_of_several_backwards_the_last_one_steps(world):
    expected, _ = world(2).run(trained, "adamw", False, micro=3)[0]
    found, left = world(2).run(trained, "adamw", True, micro=3)[0]
    assert left == [0] * 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_recomputation_reads_what_is_not_stepped_yet(world):
    expected, _ = world(2).run(trained, "adamw", False, recompute=False)[0]
    found, _ = world(2).run(trained, "adamw", True, recompute=False)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def most_gradients(in_backward):
    """The most shards with a gradient when backward reaches a block."""
    model = sharded("host")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    seen = []

    def look(*_):
        seen.append(sum(parameter.grad is not None for block in model.blocks for parameter in block.parameters()))

    for block in model.blocks:
        block.register_full_backward_pre_hook(look)
    for step in range(2):
        model(batch(step).requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(seen)


def test_gradients_of_all_units_are_never_there_at_once(world):
    assert world(2).run(most_gradients, False) == [8, 8]
    assert world(2).run(most_gradients, True)[0] <= 4


class Reads(nn.Module):
    """Reads a weight's values where no gradient goes, in a layer before the weight's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        x = self.first(x) @ self.second.weight.detach()
        return self.second(x)


def read_late(in_backward):
    torch.manual_seed(0)
    model = Reads()
    sherd.fully_shard(model.first)
    sherd.fully_shard(model.second)
    sherd.fully_shard(model)
    model.second.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    for step in range(2):
        model.second.unshard()
        model(batch(step)).square().sum().mul(1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def test_a_unit_that_backward_will_read_again_is_left_to_the_optimizers_own_step(world):
    expected, found = world(2).run(read_late, False)[0], world(2).run(read_late, True)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Twice(nn.Module):
    """Calls one block twice, each time in a checkpoint that enters autograd again."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=True), use_reentrant=True)


def stepped_twice(in_backward):
    torch.manual_seed(0)
    model = Twice()
    sherd.fully_shard(model.block)
    sherd.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    for step in range(3):
        model(batch(step).requires_grad_()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def test_gradients_that_come_twice_in_one_backward_are_refused(world):
    world(2).run(stepped_twice, False)
    with pytest.raises(RanksFailed, match="came a second time in one backward"):
        world(2).run(stepped_twice, True)


def removed():
    model = sharded("host")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sherd.step_in_backward(model, optimizer).remove()
    model(batch(0)).sum().backward()
    return sum(parameter.grad is not None for parameter in model.parameters())


def test_removed_it_leaves_all_gradients_to_the_optimizer(world):
    assert world(2).run(removed) == [14, 14]


def refusals():
    model = sharded("host")
    flat = sherd.flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    for wrong, error in [
        ((model, "adam"), PolicyTypeError),
        ((model, torch.optim.LBFGS(model.parameters())), OptimizerError),
        ((model, flat), OptimizerError),
        ((made(), torch.optim.SGD(made().parameters(), lr=1.0)), ModuleError),
    ]:
        with pytest.raises(error) as raised:
            sherd.step_in_backward(*wrong)
        said.append(str(raised.value))
    return all("step_in_backward" in each for each in said)


def test_what_cannot_be_stepped_unit_by_unit_is_refused(world):
    assert world(1).run(refusals) == [True]
