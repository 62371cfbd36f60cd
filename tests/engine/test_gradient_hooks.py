"""Once the order of a group's gradients is learnt, Python is told of the last of a batch only, until one is astray."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import Flat, fully_shard
from sherd.engine.moves.gradients import Gradients
from sherd.engine.run.unit import Unit
from sherd.memory.watch import held_by
from sherd.schedule.moments import MemoryKind
from tests.support.comparing import assert_named_close, whole_grads
from tests.support.models import WIDTH, Wired, noise
from tests.support.ranks.bodies import on_threads
from tests.support.training import made

NUM_PARAMETERS = 6


class Layers(nn.Module):
    """Three linear layers; `run` says how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.run = plainly

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plainly(model, x):
    return model.third(model.second(model.first(x).relu()).relu())


def without_the_second(model, x):
    return model.third(model.first(x).relu())


def without_the_first(model, x):
    return model.third(model.second(x).relu())


def the_second_twice(model, x):
    return model.third(model.second(model.second(model.first(x).relu()).relu()))


def in_another_order(model, x):
    return model.first(model.second(model.third(x).relu()).relu())


def recomputed(model, x):
    return model.third(checkpoint(model.second, model.first(x).relu(), use_reentrant=True).relu())


def recomputed_twice(model, x):
    x = checkpoint(model.second, model.first(x).relu(), use_reentrant=True)
    return model.third(checkpoint(model.second, x, use_reentrant=True).relu())


def recomputed_without_reentering(model, x):
    return checkpoint(plainly, model, x, use_reentrant=False)


@contextmanager
def told() -> Iterator[list[int]]:
    """A list of the gradients that Python is told of inside."""
    seen: list[int] = []
    plain = Gradients._told_of

    def note(self, index, unsharded):
        seen.append(index)
        plain(self, index, unsharded)

    with patch.object(Gradients, "_told_of", note):
        yield seen


def backward(model, step):
    model(noise(step, 0)).square().mean().backward()


def gradients(model):
    found = whole_grads(model)
    model.zero_grad()
    return found


def learnt():
    """A sharded model whose order is learnt, and the plain one."""
    model, plain = made(Layers), made(Layers)
    fully_shard(model)
    for _ in range(3):
        backward(model, 0)
        model.zero_grad()
    return model, plain


def num_told(action, *args) -> int:
    with told() as seen:
        action(*args)
    return len(seen)


def assert_as_plain(model, plain, steps=(0,)):
    for step in steps:
        backward(plain, step)
    assert_named_close(gradients(model), gradients(plain), "gradient", 1e-5, 1e-6)


@on_threads(1)
def test_python_is_told_of_each_gradient_in_two_backwards_and_then_of_the_last_one_only():
    for placement in (None, Flat()):
        model = made(Layers)
        fully_shard(model, **({} if placement is None else {"placement": placement}))
        assert [num_told(backward, model, 0) for _ in range(4)] == [NUM_PARAMETERS, NUM_PARAMETERS, 1, 1], placement


@on_threads(1, run=[without_the_second, without_the_first, in_another_order, recomputed_twice])
def test_an_order_that_does_not_hold_is_dropped_and_another_is_learnt(run):
    model, plain = learnt()
    assert num_told(backward, model, 0) == 1
    assert_as_plain(model, plain)
    model.run = plain.run = run
    for _ in range(3):
        backward(model, 1)
        assert_as_plain(model, plain, (1,))
    counts = {without_the_second: 4, without_the_first: 4, in_another_order: 1, recomputed_twice: 8}
    assert num_told(backward, model, 1) == counts[run]
    assert_as_plain(model, plain, (1,))
    model.run = plain.run = plainly
    for _ in range(3):
        backward(model, 0)
        assert_as_plain(model, plain)
    assert num_told(backward, model, 0) == 1


@on_threads(1, run=[the_second_twice, recomputed, recomputed_without_reentering])
def test_what_brings_each_gradient_once_and_in_the_same_order_keeps_it(run):
    model, plain = learnt()
    model.run = plain.run = run
    assert num_told(backward, model, 0) == 1
    assert_as_plain(model, plain)


@on_threads(1)
def test_parameters_that_are_frozen_later_are_not_waited_for():
    model, plain = learnt()
    for each in (model, plain):
        each.first.requires_grad_(False)
    assert [num_told(backward, model, 0) for _ in range(3)] == [4, 4, 1]
    assert_as_plain(model, plain, (0, 0, 0))


@on_threads(1)
def test_gradients_that_are_added_up_over_backwards_come_in_the_learnt_order():
    model, plain = made(Layers), made(Layers)
    fully_shard(model)
    counts = []
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        counts.append(num_told(backward, model, step))
    assert counts == [NUM_PARAMETERS] * 2 + [1] * 4
    assert_as_plain(model, plain, range(6))


@on_threads(1)
def test_a_graph_that_is_gone_through_twice_and_one_of_gradients_bring_what_they_do_in_plain():
    def twice(model):
        loss = model(noise(0, 0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def of_gradients(model):
        x = noise(0, 0).requires_grad_()
        (inner,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        inner.square().sum().backward()

    model, plain = learnt()
    for program in (twice, of_gradients, of_gradients):
        program(model)
        program(plain)
        assert_named_close(gradients(model), gradients(plain), "gradient", 1e-5, 1e-6)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@on_threads(1)
def test_noted_gradients_of_a_backward_that_raises_are_dropped_and_the_order_holds():
    model, plain = learnt()
    model.run = lambda model, x: model.third(model.second(Fails.apply(model.first(x)).relu()).relu())
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    assert MemoryKind.ARRIVED in {kind for kind, _ in held_by(Unit.of(model)).values()}
    model.run = plainly
    assert [num_told(backward, model, 0) for _ in range(2)] == [1, 1]
    assert_as_plain(model, plain, (0, 0))


@on_threads(1)
def test_a_gradient_that_nobody_expects_is_told_of():
    """That of a weight which the user has unsharded, and uses without a forward."""
    model, plain = learnt()
    model.unshard()
    for each in (model, plain):
        (each.second.weight.square().sum() + each.third.bias.sum()).backward()
    assert_named_close(gradients(model), gradients(plain), "gradient", 1e-5, 1e-6)


def in_turn(model, x):
    for each in model.layers:
        x = each(x)
    return x


@on_threads(1)
def test_no_more_gradients_wait_than_are_copied_together():
    """Of six of 0.6 MiB each, noted or told of, two are copied together."""
    width = 384
    model = Wired(in_turn, layers=nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6)))
    fully_shard(model)
    waiting: list[int] = []
    for each in model.layers:
        each.register_full_backward_hook(lambda *_: waiting.append(arrived_bytes(model)))
    found = []
    for _ in range(3):
        loss = model(torch.ones(2, width, requires_grad=True)).sum()
        found.append((num_told(loss.backward), waiting.copy()))
        waiting.clear()
    (first, expected), *_, (last, noted) = found
    assert (first, last) == (6, 3)
    assert noted == expected
    assert max(noted) == width * width * 4


def arrived_bytes(model):
    return sum(nbytes for kind, nbytes in held_by(Unit.of(model)).values() if kind is MemoryKind.ARRIVED)


class Joined(nn.Module):
    """Two parameters whose gradients autograd makes as views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.first, self.second]).t()


@on_threads(2)
def test_gradients_that_are_views_of_one_tensor_reach_their_own_parameters():
    plain, model = Joined(), fully_shard(Joined())
    weights = torch.arange(16.0).view(2, 8)
    for each in (plain, model):
        (each(torch.arange(6.0).view(2, 3)) * weights).sum().backward()
    expected = {name: each.grad for name, each in plain.named_parameters()}
    assert_named_close(whole_grads(model), expected, "gradient", rtol=1e-6, atol=1e-6)
