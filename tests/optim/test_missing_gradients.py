"""A parameter without gradient, and its count of steps, stay as the plain optimizer leaves them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import optim

from sherd import fully_shard
from sherd.optim import flatten_optimizer
from tests.optim.twins import (
    NAMES,
    Pair,
    adamw,
    assert_alike,
    backward,
    groups,
    run,
    same_training,
    spans_of,
    three,
)
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

MAKE = {
    "sgd": functools.partial(optim.SGD, lr=0.1),
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "adamw": adamw,
    "fused": functools.partial(optim.AdamW, lr=0.1, fused=True, amsgrad=True),
}
LAYOUTS = [("shard", 2), ("shard", 3), ("flat", 1), ("flat", 3), ("blocks", 2), ("owned", 2)]


def every_other(step):
    return NAMES[step % 2 :: 2]


def from_the_third_step_on(step):
    return NAMES if step >= 2 else NAMES[3:]


def one_unit_at_a_time(step):
    return [name for name in NAMES if name.startswith(("first", "second")[step % 2])]


def none_at_times(step):
    return [] if step == 1 else NAMES


def now_and_then(step):
    return NAMES if step % 2 else NAMES[::3]


PATTERNS = (every_other, from_the_third_step_on, one_unit_at_a_time, none_at_times, now_and_then)


@pytest.mark.pairs
@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", MAKE)
def test_only_what_has_a_gradient_is_stepped(threads, kind, placement, num_ranks):
    turn = list(MAKE).index(kind) + LAYOUTS.index((placement, num_ranks))
    threads(num_ranks).run(same_training, MAKE[kind], placement, range(4), PATTERNS[turn % len(PATTERNS)])


@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@on_threads()
def test_a_gradient_of_another_rank_is_one(placement):
    trained = three(placement)
    num_ranks = dist.get_world_size()
    for step in range(4):
        of_rank = [NAMES[(step + rank) % 3 :: 2] for rank in range(num_ranks)]
        for model, _ in trained[:2]:
            backward(model, step, of_rank[dist.get_rank()])
        for names in of_rank:
            backward(trained[2][0], step, names, 1 / num_ranks)
        for _, optimizer in trained:
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(trained)


def memory_of(optimizer):
    """Where the spans' states are."""
    return {span.state["exp_avg"].untyped_storage().data_ptr() for span in spans_of(optimizer) if span.flat.numel()}


@on_threads(2)
def test_runs_are_split_and_joined_without_copying_state():
    for placement in ("shard", "flat"):
        model = sharded(Pair(), placement)
        optimizer = flatten_optimizer(MAKE["fused"](groups(model)))
        run(model, optimizer, range(2))
        together, memory = len(spans_of(optimizer)), memory_of(optimizer)
        for step in (2, 3):
            run(model, optimizer, [step], every_other)
            assert memory_of(optimizer) <= memory, "runs are split without copying their state"
        run(model, optimizer, [4])
        assert len(spans_of(optimizer)) == together, "they are joined again, once they have counted alike"
        assert memory_of(optimizer) == memory


@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@on_threads()
def test_a_gradient_may_be_replaced(placement):
    """Gradients that lie elsewhere: replaced, or only one of them."""
    trained = three(placement)
    for model, optimizer in trained:
        for step in range(4):
            backward(model, step)
            for index, parameter in enumerate(model.parameters()):
                if step == 1 or (step == 2 and index == 3):
                    parameter.grad = parameter.grad * 2.0
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_alike(trained)


@on_threads(1)
def test_a_transposed_gradient_is_not_taken_for_the_gradient():
    """Where one rank holds all of a square matrix, its transposed gradient begins at the same place."""
    models = [torch.nn.Linear(3, 3, bias=False) for _ in range(2)]
    for model in models:
        torch.nn.init.ones_(model.weight)
        fully_shard(model)
    flat, plain = [optim.SGD(model.parameters(), lr=0.1) for model in models]
    flatten_optimizer(flat)
    for model, optimizer in zip(models, (flat, plain), strict=True):
        model(torch.arange(9.0).view(3, 3)).square().sum().backward()
        model.weight.grad = model.weight.grad.t()
        optimizer.step()
    assert_same(whole_params(models[0]), whole_params(models[1]))


def step_with_numbers_in_the_padding(placement):
    model = sharded(Pair(), placement)
    optimizer = flatten_optimizer(optim.AdamW(groups(model), lr=0.1, foreach=True))
    padded = 0
    for step in range(3):
        backward(model, step)
        for parameter in model.parameters():
            memory = parameter.grad.to_local().untyped_storage()
            everything = torch.empty(0).set_(memory)
            everything[~belongs(everything, model)] = float("nan")
        optimizer.step()
        padded += sum(int(each.padding.numel()) for each in spans_of(optimizer) if each.padding is not None)
        for each in spans_of(optimizer):
            assert torch.isfinite(each.flat).all(), "padding stays finite"
            assert all(torch.isfinite(value).all() for value in each.state.values())
        optimizer.zero_grad()
    assert all(torch.isfinite(value).all() for value in whole_params(model).values())
    return padded


def belongs(memory, model):
    """Which elements of the memory are some gradient's."""
    mine = torch.zeros(memory.numel(), dtype=torch.bool)
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel() * 4
    for parameter in model.parameters():
        local = parameter.grad.to_local()
        if local.numel() and start <= local.data_ptr() < stop:
            first = (local.data_ptr() - start) // 4
            mine[first : first + local.numel()] = True
    return mine


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("owned", 2), ("blocks", 3)])
def test_what_lies_between_gradients_stays_there(threads, placement, num_ranks):
    padded = threads(num_ranks).run(step_with_numbers_in_the_padding, placement)
    assert placement == "shard" or sum(padded) > 0, "there is padding within runs"
