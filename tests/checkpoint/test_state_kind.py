"""One rule tells the elements of an optimizer's state from its counts of steps and from the rest."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import Flat, fully_shard
from sherd.tensor.optimizers import adopt_state
from sherd.tensor.state_kind import StateKind, kind_of

SCALAR, MATRIX = torch.Size(()), torch.Size((3, 4))


@pytest.mark.parametrize(
    ("key", "value", "shape", "kind"),
    [
        ("exp_avg", torch.zeros(3, 4), MATRIX, StateKind.ELEMENTS),
        ("exp_avg", torch.zeros(4, 3), MATRIX, StateKind.OTHER),
        ("step", torch.tensor(3.0), MATRIX, StateKind.NUMBER),
        ("exp_avg", torch.tensor(3.0), MATRIX, StateKind.NUMBER),
        ("exp_avg", torch.tensor(3.0), SCALAR, StateKind.ELEMENTS),
        ("step", torch.tensor(3.0), SCALAR, StateKind.NUMBER),
        ("step", 3, SCALAR, StateKind.NO_TENSOR),
        ("momentum_buffer", None, MATRIX, StateKind.NO_TENSOR),
    ],
)
def test_shapes_tell_and_of_a_scalar_the_name(key, value, shape, kind):
    assert kind_of(key, value, shape) is kind


def test_in_a_live_state_plain_tensors_have_the_shape_of_this_ranks_part():
    assert kind_of("exp_avg", torch.zeros(6), MATRIX, torch.Size((6,))) is StateKind.ELEMENTS
    assert kind_of("exp_avg", torch.zeros(3, 4), MATRIX, torch.Size((6,))) is StateKind.OTHER


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))
        self.scalar = nn.Parameter(torch.tensor(2.0))


def names_of_scalar_elements(placement):
    model = fully_shard(_Model(), **placement)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"mu": torch.zeros_like(model.weight), "ticks": torch.tensor(1.0)}
    optimizer.state[model.scalar] = {"mu": torch.tensor(0.5), "step": torch.tensor(1.0)}
    adopt_state(optimizer)
    return [key for key, value in optimizer.state[model.scalar].items() if isinstance(value, DTensor)]


@pytest.mark.parametrize("placement", [{}, {"placement": Flat()}], ids=["shard", "flat"])
def test_a_scalar_has_elements_under_the_keys_under_which_other_parameters_have_them(threads, placement):
    assert threads(2).run(names_of_scalar_elements, placement) == [["mu"], ["mu"]]
