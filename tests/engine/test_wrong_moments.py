"""What is said when a gradient cannot be reduced, or shards are asked for while they are needed whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sherd import CommPolicy, FullyShardedDataParallel, fully_shard
from sherd.errors import GradientError, StateError
from tests.support.comparing import assert_refused, whole
from tests.support.models import Wired
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal


@on_threads(2)
def test_a_sparse_gradient_raises_with_the_parameters_name_and_the_remedy():
    loss = fully_shard(nn.Embedding(6, 4, sparse=True))(torch.tensor([0, 3])).sum()
    said = ("weight: its gradient", "torch.sparse_coo", "sparse=False")
    assert_refused(loss.backward, GradientError, RuntimeError, *said)


@on_threads(2)
def test_asking_for_shards_in_the_middle_of_backward_raises():
    model, asked = fully_shard(nn.Linear(4, 4)), []

    def ask(gradient):
        assert_refused(model.state_dict, StateError, RuntimeError, "in the middle of a backward")
        asked.append(gradient)

    hidden = torch.ones(2, 4, requires_grad=True) * 1
    output = model(hidden)
    output.register_hook(lambda gradient: None)
    model.set_reshard_after_backward(False)
    hidden.register_hook(ask)
    output.sum().backward()
    assert asked


@on_threads(2)
def test_between_forward_and_backward_the_shards_are_shown_when_asked_for():
    """Kept parameters are given back for a state dict and gathered again for backward."""
    model = fully_shard(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    saved = whole(model.state_dict()["weight"])
    assert torch.equal(saved, whole(model.weight))
    loss.backward()
    assert model.weight.grad is not None


def actor_and_critic(shard: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any]:
    """Two roots over one encoder."""
    torch.manual_seed(0)
    encoder = shard(nn.Linear(8, 8))
    return shard(nn.Sequential(encoder, nn.Linear(8, 3))), shard(nn.Sequential(encoder, nn.Linear(8, 2)))


def in_turns(actor: Any, critic: Any) -> list[Any]:
    """The losses of both, their forwards and backwards in several orders, and the gradients that these add up to."""
    x, losses = torch.linspace(-1, 1, 16).view(2, 8), []
    for first, second in ((actor, critic), (critic, actor), (actor, critic)):
        one = first(x).square().sum()
        with torch.no_grad():
            losses.append(second(x).square().sum())
        two = second(x).square().sum()
        one.backward()
        two.backward()
        losses += [one, two]
        with torch.no_grad():
            for each in (*actor.parameters(), *critic[1].parameters()):  # as an optimizer steps
                each.sub_(each.grad, alpha=0.01)
    return whole([loss.detach() for loss in losses] + [each.grad for each in actor.parameters()])


@pytest.mark.parametrize(
    "shard",
    [
        fully_shard,
        partial(fully_shard, reshard_after_forward=False),
        partial(fully_shard, placements="zero1"),
        partial(fully_shard, comm_policy=CommPolicy(divergence="join")),
        partial(FullyShardedDataParallel, use_orig_params=True),
    ],
    ids=["freed", "kept", "copies", "joined", "wrapper"],
)
@on_processes(2)
def test_roots_over_one_unit_take_turns(shard):
    expected = in_turns(*actor_and_critic(lambda module: module))
    for found, its in zip(in_turns(*actor_and_critic(shard)), expected, strict=True):
        torch.testing.assert_close(found, its)


@on_threads(2)
def test_one_backward_through_two_roots_over_a_unit_is_refused_and_one_module_may_have_both():
    x, (actor, critic) = torch.ones(2, 8), actor_and_critic(fully_shard)
    said = refusal(StateError, (actor(x).sum() * critic(x).sum()).backward)
    assert "a module that has both" in said, said
    critic.reset_iter_state()
    actor(x).sum().backward()
    parts = dict(zip(("actor", "critic"), actor_and_critic(fully_shard), strict=True))
    both: Any = fully_shard(Wired(lambda self, x: self.actor(x).sum() * self.critic(x).sum(), **parts))
    both(x).backward()
    both.actor(x).sum().backward()
    with torch.no_grad():
        both.critic(x)
    (both.actor(x).sum() * both.critic(x).sum()).backward()
