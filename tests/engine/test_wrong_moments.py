"""What is said when a gradient cannot be reduced, or shards are asked for while they are needed whole."""

from typing import Any

import torch
from torch import nn

from sherd import fully_shard
from sherd.errors import GradientError, OwnershipError, StateError
from tests.support.comparing import assert_refused, whole
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
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


@on_threads(2)
def test_a_second_root_over_a_unit_is_refused_until_the_first_is_gone_and_one_module_may_have_both():
    def two_roots() -> nn.ModuleDict:
        encoder = nn.Linear(8, 8)
        heads = {name: nn.Sequential(encoder, nn.Linear(8, 3)) for name in ("actor", "critic")}
        for unit in (encoder, *heads.values()):
            fully_shard(unit)
        return nn.ModuleDict(heads)

    x, heads = torch.ones(2, 8), two_roots()
    heads["actor"](x).sum().backward()
    said = refusal(OwnershipError, heads["critic"], x)
    assert "a module that has both" in said, said
    heads["actor"](x).sum().backward()
    del heads["actor"]
    heads["critic"](x).sum().backward()
    parts = dict(two_roots().items())
    both: Any = fully_shard(Wired(lambda self, x: self.actor(x).sum() * self.critic(x).sum(), **parts))
    both(x).backward()
    both.actor(x).sum().backward()
    with torch.no_grad():
        both.critic(x)
    (both.actor(x).sum() * both.critic(x).sum()).backward()
