"""A sharded model works inside a function that `torch.func` transforms, and trains on what comes out of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard, replicate
from tests.support.models import WIDTH, Wired
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded
from tests.support.training import made

# torch's own, when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def flow():
    """A function of a point and a time, whose derivative along both is trained too."""
    parts = {"rise": nn.Linear(WIDTH + 1, WIDTH), "fall": nn.Linear(WIDTH, WIDTH)}
    return Wired(lambda self, point, time: self.fall(torch.relu(self.rise(torch.cat((point, time), dim=-1)))), **parts)


def sample(seed):
    """A point that is a leaf, a time that is a result, and a direction to go."""
    generator = torch.Generator().manual_seed(seed)
    point, direction = torch.randn(2, 4, WIDTH, generator=generator)
    time = torch.rand(4, 1, generator=generator).requires_grad_()
    return point.requires_grad_(), time * 2, direction


def derivative(model, seed):
    """Of forward mode; backward comes in through the value and through the tangent."""
    point, time, direction = sample(seed)
    value, tangent = torch.func.jvp(model, (point, time), (direction, torch.ones_like(time)))
    return (value - point).square().mean() + tangent.square().mean()


def tangent_only(model, seed):
    """Backward comes in through the tangent alone."""
    point, time, direction = sample(seed)
    return torch.func.jvp(model, (point, time), (direction, torch.ones_like(time)))[1].square().mean()


def batched(model, seed):
    """One call for each sample of the batch, as the model sees it."""
    point, time, _ = sample(seed)
    return torch.vmap(model)(point, time).square().mean()


def shard_kept(module):
    return fully_shard(module, reshard_after_forward=False)


@pytest.mark.parametrize("shard", [fully_shard, shard_kept, replicate])
@pytest.mark.parametrize("loss_of", [derivative, tangent_only, batched])
@on_processes(2)
def test_what_comes_out_of_a_transform_trains_as_in_one_process(loss_of, shard):
    plain, model = made(flow), made(flow)
    for module in (model.rise, model.fall, model):
        shard(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    num_ranks = dist.get_world_size()
    for step in range(2):
        for rank in range(num_ranks):
            (loss_of(plain, 10 * step + rank) / num_ranks).backward()
        loss_of(model, 10 * step + dist.get_rank()).backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), f"{name}: a bias is not in a tangent"
            if expected is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_processes(2)
def test_a_gradient_is_taken_inside_a_transform():
    """Forward and backward are both inside; nobody asks for the parameters' gradients."""
    plain, model = made(flow), sharded(made(flow))
    point, time, _ = sample(dist.get_rank())

    def height(at, of):
        return of(at, time.detach()).square().sum()

    for _ in range(2):
        expected = torch.func.grad(height)(point.detach(), plain)
        torch.testing.assert_close(torch.func.grad(height)(point.detach(), model), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
