"""From its second step on torch's optimizer computes on local tensors: as before, and nobody sees it."""

import copy
import gc
import sys

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

import sherd
from sherd import Blocks, Flat, Owned, fully_shard
from sherd._torch import local_tensor
from sherd.errors import OptimStateError
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
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


# It is the user's optimizer


def hook_that_writes_into_what_it_is_given(optimizer, step):
    if step == 0:
        seen.clear()
        optimizer.register_step_pre_hook(lambda of, args, kwargs: seen.append((of, args[0])))
        optimizer.register_step_pre_hook(lambda of, args, kwargs: args[0].param_groups[0].update(lr=0.001))
        optimizer.register_step_post_hook(lambda of, args, kwargs: args[0].state.clear())
    optimizer.param_groups[0]["lr"] = 0.1


def method_replaced_that_looks_at_whole_tensors(optimizer, step):
    if step == 2:
        theirs = optimizer._init_group

        def init_group(group, params, grads, *more):
            result = theirs(group, params, grads, *more)
            grads[:] = [each / each.norm() for each in grads]
            return result

        optimizer._init_group = init_group


def step_replaced(optimizer, step):
    if step == 2:
        theirs = optimizer.step

        def twice(closure=None):
            theirs()
            return theirs()

        optimizer.step = twice


def zero_grad_replaced_by_one_that_counts(optimizer, step):
    if step == 2:
        theirs = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=True: theirs(set_to_none=False)


def attribute_that_the_groups_share(optimizer, step):
    optimizer.param_groups[0]["weight_decay"] = 0.1 * step


def list_of_parameters_replaced(optimizer, step):
    group = optimizer.param_groups[0]
    group["params"] = list(reversed(group["params"]))


REPLACED = [
    hook_that_writes_into_what_it_is_given, method_replaced_that_looks_at_whole_tensors, step_replaced,
    zero_grad_replaced_by_one_that_counts, attribute_that_the_groups_share, list_of_parameters_replaced,
]  # fmt: skip
seen = []


@on_processes(2)
def test_hooks_and_replaced_methods_act_on_the_users_optimizer():
    for between in REPLACED:
        (plain, its), (model, optimizer) = twins(lambda each: optim.AdamW(each, lr=0.1, foreach=False))
        steps(plain, its, 5, between)
        steps(model, optimizer, 5, between)
        assert_same(whole_params(model), whole_params(plain), between.__name__, rtol=1e-5, atol=1e-7)
        assert all(of is optimizer and given is optimizer for of, given in seen)
        seen.clear()


class Halved(optim.AdamW):
    """A subclass with groups of its own kind."""

    def _init_group(self, group, params, grads, *more):
        result = super()._init_group(group, params, grads, *more)
        for each in grads:
            each.div_(each.norm())
        return result


@on_threads(2)
def test_a_subclass_that_looks_at_whole_tensors_gets_them():
    (plain, its), (model, optimizer) = twins(lambda each: Halved(each, foreach=False))
    steps(plain, its, 4)
    steps(model, optimizer, 4)
    assert_same(whole_params(model), whole_params(plain), rtol=1e-5, atol=1e-7)


def with_state(optimizer, form):
    """Put the first moments there by hand, in one of the forms that a user may have them in."""
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        value = torch.linspace(0, 1 + number, max(parameter.numel(), 1)).view(parameter.shape)
        if isinstance(parameter, DTensor) and form != "whole":
            piece = torch.empty_like(parameter)
            piece.data = value
            value = piece if form == "sharded" else piece.to_local()
        state["exp_avg"] = value


@on_threads(2)
def test_state_that_is_put_there_by_hand_is_cut_like_its_parameter():
    for form in ("whole", "sharded", "part"):
        for placement in (None, Flat(), Owned()):
            for closure in (False, True):
                (plain, its), (model, optimizer) = twins(optim.AdamW, placement)
                for each, own in ((plain, its), (model, optimizer)):
                    steps(each, own, 2)
                    with_state(own, form)
                    if closure:
                        each(torch.ones(4, 3)).square().sum().backward()
                        own.step(lambda: None)
                        own.zero_grad()
                    steps(each, own, 2)
                assert_same(whole_params(model), whole_params(plain), (form, placement))


@on_threads(2)
def test_a_state_of_unsharded_tensors_is_loaded():
    for placement in (None, Flat(), Owned()):
        (plain, its), (model, optimizer) = twins(optim.AdamW, placement)
        steps(plain, its, 3)
        steps(model, optimizer, 3)
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        steps(plain, its, 2)
        steps(model, optimizer, 2)
        assert_same(whole_params(model), whole_params(plain), placement)


@on_threads(2)
def test_state_of_another_shape_is_refused_by_name():
    for placement in (None, Flat(), Owned()):
        _, (model, optimizer) = twins(optim.AdamW, placement)
        steps(model, optimizer, 2)
        optimizer.state[model.up.weight]["exp_avg"] = torch.zeros(7)
        said = refusal(OptimStateError, steps, model, optimizer, 1)
        assert said.startswith("up.weight: its state 'exp_avg' has shape (7,)"), said
