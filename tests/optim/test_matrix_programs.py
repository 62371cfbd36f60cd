"""Whole programs around steps of whole matrices train as in one process, and what cannot be done is refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sherd
from sherd import CommPolicy, MatrixOptimizer, Muon
from tests.optim.test_muon import EXACT, assert_as_plain, batches, stack, trained
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded


def matrices() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False))


# torch.optim.Muon: every step over shards is one of whole matrices


class _Inherits(torch.optim.Muon):
    pass


def _before_sharding(model, shard):
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    trained(shard(model), optimizer, batches(2))


def _by_a_subclass(model, shard):
    trained(shard(model), _Inherits(model.parameters(), lr=0.02), batches(2))


def _by_closures(model, shard):
    optimizer = torch.optim.Muon(shard(model).parameters(), lr=0.02)
    for batch in batches(2):

        def loss(batch=batch):
            optimizer.zero_grad()
            value = model(batch).square().mean()
            value.backward()
            return value

        assert torch.is_tensor(optimizer.step(loss))
        assert torch.is_tensor(optimizer.step(closure=loss))


def _after_steps_of_others(model, shard):
    other = matrices()
    optimizer = torch.optim.Muon(other.parameters(), lr=0.02)
    trained(other, optimizer, batches(1))
    optimizer.add_param_group({"params": list(shard(model).parameters())})
    trained(model, optimizer, batches(2))


def _in_backward(model, shard):
    optimizer = torch.optim.Muon(shard(model).parameters(), lr=0.02)
    if any(isinstance(each, DTensor) for each in model.parameters()):
        sherd.step_in_backward(model, optimizer)
    trained(model, optimizer, batches(2))


@pytest.mark.parametrize(
    "program", [_before_sharding, _by_a_subclass, _by_closures, _after_steps_of_others, _in_backward]
)
@on_threads(2, front=["shard", "flat"])
def test_torchs_muon_steps_whole_matrices_however_it_is_called(program, front):
    plain, model = matrices(), matrices()
    program(plain, lambda model: model)
    program(model, lambda model: sharded(model, front))
    assert_as_plain(model, plain)


# Hooks


def test_hooks_see_one_step_of_one_optimizer():
    model, seen = stack(), []
    MatrixOptimizer([model[2].weight], torch.sign)  # torch wraps the step of a class when the first object is made
    optimizer = Muon(model)
    optimizer.register_step_post_hook(lambda one, *_: seen.append(one))
    everywhere = register_optimizer_step_pre_hook(lambda one, *_: seen.append(one))
    trained(model, optimizer, batches(1))
    everywhere.remove()
    assert seen == [optimizer, optimizer]


@on_processes(2)
def test_a_rank_without_any_batch_steps_with_the_others():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"))
    theirs, optimizer = Muon(plain, lr=0.02, **EXACT), Muon(model, lr=0.02, **EXACT)
    for batch in batches(3):
        (plain(batch).square().mean() / 2).backward()  # the other rank's gradients count as zeros
        theirs.step()
        theirs.zero_grad()
    with sherd.join(model, optimizer):
        trained(model, optimizer, batches(3) if torch.distributed.get_rank() == 0 else [])
    assert_as_plain(model, plain)
