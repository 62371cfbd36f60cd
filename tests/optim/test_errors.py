"""Optimizers without a flat form are refused, and the message says what to do."""

import pytest
import torch
from torch import nn, optim

from sherd.errors import OptimizerError, SherdError
from sherd.optim import flatten_optimizer
from tests.support.comparing import assert_refused


def parameters():
    return [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2, 2))]


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


def test_an_optimizer_that_looks_at_whole_tensors_is_refused():
    for kind in (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam):
        for elementwise in (False, True):
            with pytest.raises(OptimizerError, match=rf"{kind.__name__} looks at whole tensors.*placement=Owned\(\)"):
                flatten_optimizer(kind(parameters()), elementwise=elementwise)


def test_an_unknown_class_must_be_said_to_be_elementwise_and_one_with_the_step_of_a_known_class_is_known():
    for kind in (Own, Trusting):
        with pytest.raises(OptimizerError, match=rf"{kind.__name__} is not known .* elementwise=True"):
            flatten_optimizer(kind(parameters()))
        assert isinstance(flatten_optimizer(kind(parameters()), elementwise=True), kind)
    assert isinstance(flatten_optimizer(Named(parameters())), Named)


def test_flattening_twice_after_a_scheduler_or_of_a_differentiable_step_is_refused():
    optimizer = flatten_optimizer(optim.SGD(parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="is flattened already; call flatten_optimizer once"):
        flatten_optimizer(optimizer)
    optimizer = optim.SGD(parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OptimizerError, match="call flatten_optimizer before building the scheduler"):
        flatten_optimizer(optimizer)
    optimizer = optim.SGD(parameters(), lr=0.1, differentiable=True)
    with pytest.raises(OptimizerError, match="differentiable=False"):
        flatten_optimizer(optimizer)
    assert type(optimizer) is optim.SGD, "it is as it was"


def test_what_is_no_optimizer_is_named():
    for given in (None, [], nn.Linear(2, 2)):
        named = f"expects a torch.optim.Optimizer, got a {type(given).__name__}"
        assert_refused(lambda given=given: flatten_optimizer(given), SherdError, TypeError, named)
