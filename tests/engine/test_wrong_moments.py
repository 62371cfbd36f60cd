"""What is said when a gradient cannot be reduced, or shards are asked for while they are needed whole."""

import torch
from torch import nn

from sherd import fully_shard
from sherd.errors import GradientError, StateError
from tests.support.comparing import assert_refused, whole
from tests.support.ranks.bodies import on_threads


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
