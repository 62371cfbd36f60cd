"""From its second step on torch's optimizer computes on local tensors: as before, and nobody sees it."""

import copy
import gc
import sys

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

import sherd
from sherd import Blocks, Flat, fully_shard
from sherd._torch import local_tensor
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_threads
from tests.support.training import made

CLASSES = [optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
           optim.RMSprop, optim.Rprop, optim.SGD]  # fmt: skip
FORMS = [{"foreach": True}, {"foreach": False}, {"fused": True}]


class Scaled(nn.Module):
    """With a scalar, and a parameter that is given its first gradient late."""

    def __init__(self):
        super().__init__()
        self.up, self.scale, self.late = nn.Linear(3, 5), nn.Parameter(torch.tensor(1.5)), nn.Linear(5, 2)
        self.uses_late = False

    def forward(self, x):
        x = self.up(x).tanh() * self.scale
        return self.late(x) if self.uses_late else x


def steps(model, optimizer, number, between=lambda optimizer, step: None):
    for step in range(number):
        model.uses_late = step >= 2
        model(torch.linspace(-1, 1, 12).view(4, 3)).square().sum().backward()
        between(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()


def twins(make, placement=None):
    plain, model = made(Scaled), made(Scaled)
    fully_shard(model, placement=placement, ignored_params={model.late.bias})
    return [(each, make(each.parameters())) for each in (plain, model)]


@pytest.mark.parametrize("kind", CLASSES)
@on_threads(2)
def test_steps_are_those_of_a_plain_optimizer(kind):
    for form in FORMS:
        if "fused" in form and kind not in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad):
            continue
        for placement in (None, Blocks(2), Flat()):
            (plain, its), (model, optimizer) = twins(lambda each, form=form: kind(each, **form), placement)
            steps(plain, its, 5)
            steps(model, optimizer, 5)
            assert_same(whole_params(model), whole_params(plain), (form, placement))


def calls_within(operation):
    """The names of operations that reach Python while `operation` runs."""
    found = []

    def seen(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "__torch_dispatch__":
            found.append(str(frame.f_locals.get("func")))

    sys.setprofile(seen)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return found


@on_threads(2)
def test_a_later_step_dispatches_no_operation_of_a_sharded_tensor():
    _, (model, optimizer) = twins(optim.AdamW)
    counts = []

    def step():
        counts.append(len(calls_within(optimizer.step)))

    for _ in range(3):
        model(torch.ones(4, 3)).square().sum().backward()
        step()
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


@on_threads(2)
def test_the_state_looks_as_it_did():
    _, (model, optimizer) = twins(optim.AdamW)
    steps(model, optimizer, 4)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        of = type(parameter) if isinstance(parameter, DTensor) else torch.Tensor
        assert type(state["exp_avg"]) is of
        assert type(state["step"]) is torch.Tensor
        assert parameter.grad is None
        if isinstance(parameter, DTensor):
            assert state["exp_avg"].placements == parameter.placements
            assert local_tensor(parameter).grad is None


def state_loaded(optimizer, step):
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def one_piece_replaced(optimizer, step):
    if step == 3:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        state["exp_avg"] = state["exp_avg"] * 2


def one_state_dropped(optimizer, step):
    if step == 3:
        del optimizer.state[optimizer.param_groups[0]["params"][0]]


def other_rate_and_group(optimizer, step):
    optimizer.param_groups[0]["lr"] *= 0.5
    if step == 3:
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [moved], "lr": 0.1})


def gradients_replaced(optimizer, step):
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 2


def hook_that_changes_gradients(optimizer, step):
    if step == 0:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: gradients_replaced(optimizer, 0))


BETWEEN = [
    state_loaded, one_piece_replaced, one_state_dropped, other_rate_and_group, gradients_replaced,
    hook_that_changes_gradients,
]  # fmt: skip


@on_threads(2)
def test_what_a_user_changes_between_steps_counts():
    for between in BETWEEN:
        (plain, its), (model, optimizer) = twins(optim.AdamW)
        steps(plain, its, 6, between)
        steps(model, optimizer, 6, between)
        assert_same(whole_params(model), whole_params(plain), between.__name__)


@on_threads(2)
def test_an_exception_in_a_step_leaves_the_optimizer_as_it_was():
    (plain, its), (model, optimizer) = twins(optim.AdamW)
    for each, its_optimizer in ((plain, its), (model, optimizer)):
        steps(each, its_optimizer, 3)
        its_optimizer.param_groups[0]["betas"] = None
        each(torch.ones(4, 3)).sum().backward()
        with pytest.raises(TypeError):
            its_optimizer.step()
        assert all(isinstance(key, nn.Parameter) for key in its_optimizer.state)
        its_optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        its_optimizer.step()
        steps(each, its_optimizer, 2)
    assert_same(whole_params(model), whole_params(plain))


@on_threads(1)
def test_a_thousand_steps_keep_nothing():
    _, (model, optimizer) = twins(optim.AdamW)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    counts = []
    for step in range(1000):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        if step in (99, 999):
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[1] <= counts[0]  # what an earlier test of this process has left may go in between
