"""One rule tells the elements of an optimizer's state from its counts of steps and from the rest."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import Flat, fully_shard
from sherd.tensor.optimizers import adopt_state
from sherd.tensor.state_kind import StateKind, state_kind
from tests.support.ranks.bodies import on_threads

SCALAR, MATRIX = torch.Size(()), torch.Size((3, 4))


def test_shapes_tell_and_of_a_scalar_the_name():
    for key, value, shape, kind in (
        ("exp_avg", torch.zeros(3, 4), MATRIX, StateKind.ELEMENTS),
        ("exp_avg", torch.zeros(4, 3), MATRIX, StateKind.OTHER),
        ("step", torch.tensor(3.0), MATRIX, StateKind.NUMBER),
        ("exp_avg", torch.tensor(3.0), MATRIX, StateKind.NUMBER),
        ("exp_avg", torch.tensor(3.0), SCALAR, StateKind.ELEMENTS),
        ("step", torch.tensor(3.0), SCALAR, StateKind.NUMBER),
        ("step", 3, SCALAR, StateKind.NO_TENSOR),
        ("momentum_buffer", None, MATRIX, StateKind.NO_TENSOR),
    ):
        assert state_kind(key, value, shape) is kind, (key, value, shape)
    # In a live state, plain tensors have the shape of this rank's part.
    assert state_kind("exp_avg", torch.zeros(6), MATRIX, torch.Size((6,))) is StateKind.ELEMENTS
    assert state_kind("exp_avg", torch.zeros(3, 4), MATRIX, torch.Size((6,))) is StateKind.OTHER


@on_threads(2)
def test_a_scalar_has_elements_under_the_keys_under_which_other_parameters_have_them():
    for placement in (None, Flat()):
        model = nn.Module()
        model.weight, model.scalar = nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.tensor(2.0))
        fully_shard(model, placement=placement)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"mu": torch.zeros_like(model.weight), "ticks": torch.tensor(1.0)}
        optimizer.state[model.scalar] = {"mu": torch.tensor(0.5), "step": torch.tensor(1.0)}
        adopt_state(optimizer)
        state = optimizer.state[model.scalar]
        assert [key for key, value in state.items() if isinstance(value, DTensor)] == ["mu"], placement
