"""What is said when a gradient cannot be reduced, or shards are asked for while they are needed whole?"""

import pytest
import torch
from torch import nn

from sherd import fully_shard
from sherd.errors import GradientError, StateError


class Asks(nn.Module):
    """A linear layer that does something else in the middle of its forward, once."""

    def __init__(self, inside) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside = inside

    def forward(self, x):
        inside, self.inside = self.inside, None
        if inside is not None:
            inside(self)
        return self.linear(x)


def error_of_a_sparse_gradient() -> str:
    model = fully_shard(nn.Embedding(6, 4, sparse=True))
    with pytest.raises(GradientError) as raised:
        model(torch.tensor([0, 3])).sum().backward()
    return str(raised.value)


def test_a_sparse_gradient_raises_with_the_parameters_name_and_the_remedy(world):
    for said in world(2).run(error_of_a_sparse_gradient):
        assert "weight: its gradient" in said
        assert "torch.sparse_coo" in said
        assert "sparse=False" in said


CALLS = {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "to": lambda model: model.to(torch.float64),
}


def error_in_forward(call: str) -> tuple[str, bool]:
    """What is said, and whether the model works afterwards."""
    model = fully_shard(Asks(CALLS[call]))
    with pytest.raises(StateError) as raised:
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return str(raised.value), model.linear.weight.grad is not None


@pytest.mark.parametrize("call", CALLS)
def test_asking_for_shards_in_the_middle_of_forward_raises_and_the_model_stays_usable(world, call):
    for said, usable in world(2).run(error_in_forward, call):
        assert "unit Asks" in said
        assert "in the middle of a forward" in said
        assert "do it before or after" in said
        assert usable


def error_in_backward() -> str:
    model = fully_shard(nn.Linear(4, 4))
    said: list[str] = []

    def ask(gradient):
        with pytest.raises(StateError) as raised:
            model.state_dict()
        said.append(str(raised.value))

    x = torch.ones(2, 4, requires_grad=True)
    hidden = x * 1
    output = model(hidden)
    output.register_hook(lambda gradient: None)
    model.set_reshard_after_backward(False)
    hidden.register_hook(ask)
    output.sum().backward()
    return said[0]


def test_asking_for_shards_in_the_middle_of_backward_raises_too(world):
    for said in world(2).run(error_in_backward):
        assert "in the middle of a backward" in said


def shards_between_forward_and_backward() -> bool:
    """Kept parameters are given back for a state dict and gathered again for backward."""
    model = fully_shard(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    saved = model.state_dict()["weight"].to_local().clone()
    return torch.equal(saved, model.weight.to_local()) and loss.item() == loss.item()


def test_between_forward_and_backward_the_shards_are_shown_when_asked_for(world):
    assert world(2).run(shards_between_forward_and_backward) == [True, True]
