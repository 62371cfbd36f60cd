"""Optimizers without a flat form are refused, and the message says what to do."""

import pytest
import torch
from torch import nn, optim

from sherd.errors import OptimizerError, SherdError
from sherd.optim import flatten_optimizer


def parameters():
    return [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2, 2))]


WHOLE = [optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam]


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("elementwise", [False, True])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused(kind, elementwise):
    with pytest.raises(OptimizerError, match=rf"{kind.__name__} looks at whole tensors.*placement=Owned\(\)"):
        flatten_optimizer(kind(parameters()), elementwise=elementwise)


class Own(optim.Optimizer):
    """Sign descent."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Trusting(optim.AdamW):
    """A step of its own, which may look at norms."""

    def step(self, closure=None):
        return super().step(closure)


class Named(optim.AdamW):
    """Only other defaults."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5)


@pytest.mark.parametrize("kind", [Own, Trusting])
def test_an_unknown_class_must_be_said_to_be_elementwise(kind):
    with pytest.raises(OptimizerError, match=rf"{kind.__name__} is not known .* elementwise=True"):
        flatten_optimizer(kind(parameters()))
    optimizer = flatten_optimizer(kind(parameters()), elementwise=True)
    assert isinstance(optimizer, kind)


def test_a_child_with_the_step_of_a_known_class_is_known():
    assert isinstance(flatten_optimizer(Named(parameters())), Named)


def test_flattening_twice_says_so():
    optimizer = flatten_optimizer(optim.SGD(parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="is flattened already; call flatten_optimizer once"):
        flatten_optimizer(optimizer)


def test_a_scheduler_comes_after():
    optimizer = optim.SGD(parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OptimizerError, match="call flatten_optimizer before building the scheduler"):
        flatten_optimizer(optimizer)


def test_a_differentiable_step_is_refused():
    with pytest.raises(OptimizerError, match="differentiable=False"):
        flatten_optimizer(optim.SGD(parameters(), lr=0.1, differentiable=True))


@pytest.mark.parametrize("given", [None, [], nn.Linear(2, 2)])
def test_what_is_no_optimizer_is_named(given):
    with pytest.raises(TypeError, match=f"expects a torch.optim.Optimizer, got a {type(given).__name__}") as raised:
        flatten_optimizer(given)
    assert isinstance(raised.value, SherdError)


def test_a_refused_optimizer_is_as_it_was():
    optimizer = optim.SGD(parameters(), lr=0.1, differentiable=True)
    with pytest.raises(OptimizerError):
        flatten_optimizer(optimizer)
    assert type(optimizer) is optim.SGD
