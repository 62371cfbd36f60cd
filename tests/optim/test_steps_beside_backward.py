"""Matrices that are stepped within backward train as in one process, whatever else a program does."""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import sherd
from sherd import CommPolicy, MatrixOptimizer, Muon
from sherd.errors import OptimizerError, StateError
from sherd.optim.exchange import Bucket, Moving
from tests.optim.test_matrix_programs import _LanguageModel, assert_experts_are_stepped, grown
from tests.optim.test_muon import EXACT, FRONTS, assert_as_plain, batches, sharded_by, stack, trained
from tests.support.comparing import whole_params
from tests.support.models import chain, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import one_line
from tests.support.sharding import sharded


def muon(model: nn.Module, **options) -> Muon:
    return Muon(model, lr=0.02, **EXACT, **options)


@on_threads(1, 2, 3, front=FRONTS)
def test_muon_trains_as_in_one_process_and_all_updates_are_there_when_backward_is_over(front):
    plain, model = stack(), sharded_by(front, stack())
    sherd.step_in_backward(model, muon(model, beta2=0.9))
    optimizer = muon(plain, beta2=0.9)
    for batch in batches(4):
        trained(plain, optimizer, [batch])
        model(batch).square().mean().backward()
        assert_as_plain(model, plain)


def test_what_units_send_is_under_way_while_backward_goes_on(threads, monkeypatch):
    start, wait, under_way = Bucket._start, Moving.wait, Counter()

    def started(self, *given):
        under_way[dist.get_rank()] += 1
        return start(self, *given)

    def waited(self):
        under_way[dist.get_rank()] -= 1
        return wait(self)

    def seen(placement) -> list[int]:
        model, numbers = chain(4, 6), []
        for block in model:
            sherd.fully_shard(block, **({} if placement is None else {"placement": placement}))
            block.register_full_backward_pre_hook(lambda *_: numbers.append(under_way[dist.get_rank()]))
        sherd.step_in_backward(model, muon(model))
        for _ in range(2):
            numbers.clear()
            model(noise(0, 0, 3, 6).requires_grad_()).sum().backward()
        return [*numbers, under_way[dist.get_rank()]]

    monkeypatch.setattr(Bucket, "_start", started)
    monkeypatch.setattr(Moving, "wait", waited)
    assert threads(2).run(seen, Shard(0)) == [[0, 1, 2, 2, 0]] * 2
    assert threads(2).run(seen, None) == [[0, 1, 1, 1, 0]] * 2


def test_the_work_of_units_that_are_stepped_one_by_one_is_divided_between_all_ranks(threads):
    def computed() -> set[int]:
        model = chain(4, 6)
        for block in model:
            sherd.fully_shard(block, placement=Shard(0))
        optimizer, calls = muon(model), []
        updates = optimizer.updates
        optimizer.updates = lambda *given: calls.append(len(given[1])) or updates(*given)
        sherd.step_in_backward(model, optimizer)
        model(noise(0, 0, 3, 6)).sum().backward()
        return sum(calls)

    assert threads(4).run(computed) == [2, 2, 2, 2]


@pytest.mark.parametrize("how", ["updates", "gradients"])
@on_threads(2, placement=[None, Shard(0)])
def test_an_error_in_the_products_raises_on_all_ranks_and_the_next_backward_begins_anew(how, placement):
    model, fails = chain(3, 6), [False]
    for block in model:
        sherd.fully_shard(block, **({} if placement is None else {"placement": placement}))

    def function(matrices):
        if fails[0] and dist.get_rank() == 1:
            if how == "updates":
                raise ValueError("no")
            return matrices * torch.nan
        return matrices

    matrices = [each for each in model.parameters() if each.ndim == 2]
    sherd.step_in_backward(model, MatrixOptimizer(matrices, function, lr=0.1))
    for fails[0] in (False, True, False):
        said = one_line(OptimizerError, model(noise(0, 0, 3, 6)).sum().backward)
        assert ("raised ValueError" in said or "rank 1" in said) is fails[0], said
    whole = whole_params(model)
    assert all(bool(each.isfinite().all()) for each in whole.values())


@on_threads(2, front=["shard", "cut"])
def test_an_error_names_the_parameter_of_the_unit_that_is_stepped(front):
    model = sharded_by(front, stack())
    optimizer = muon(model)
    updates = optimizer.updates
    optimizer.updates = lambda group, given: given / 0 if given.shape[1:] == (4, 7) else updates(group, given)
    sherd.step_in_backward(model, optimizer)
    said = one_line(OptimizerError, model(batches(1)[0]).sum().backward)
    assert said.startswith("the update of 4.weight, computed on rank"), said


@on_threads(2)
def test_what_is_under_way_goes_with_a_backward_that_raises():
    model, plain = chain(3, 6), chain(3, 6)
    for block in model:
        sherd.fully_shard(block, placement=Shard(0))
    steps = sherd.step_in_backward(model, muon(model))
    for raises in (True, False):
        handle = model[0].register_full_backward_pre_hook(lambda *_, raises=raises: 1 / 0 if raises else None)
        loss = model(noise(0, 0, 3, 6).requires_grad_()).sum()
        if raises:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            assert steps._under_way() is None
        else:
            loss.backward()
        handle.remove()
    assert set(whole_params(model)) == set(dict(plain.named_parameters()))


# What needs all gradients


@on_threads(2)
def test_clipping_and_scaling_say_that_the_step_has_not_waited_and_what_makes_it_wait():
    plain, model = stack(), sharded(stack())
    optimizers = [muon(plain), muon(model)]
    steps, scaler = sherd.step_in_backward(model, optimizers[1]), sherd.ShardedGradScaler("cpu")
    for call in (lambda: sherd.clip_grad_norm_(model.parameters(), 0.1), lambda: scaler.unscale_(optimizers[1])):
        scaler.scale(torch.ones(1))
        said = one_line(StateError, call)
        assert re.search("step_in_backward steps .* before they are there; call remove()", said), said
    steps.remove()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        for batch in batches(3):
            each(batch).square().mean().backward()
            sherd.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_as_plain(model, plain)


# Ranks that differ


@on_processes(2)
def test_experts_without_tokens_on_a_rank_are_stepped_alike():
    assert_experts_are_stepped(in_backward=True)


@on_processes(2)
def test_a_rank_without_any_batch_steps_with_the_others():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"))
    theirs, optimizer = muon(plain), muon(model)
    sherd.step_in_backward(model, optimizer)
    for batch in batches(3):
        (plain(batch).square().mean() / 2).backward()  # the other rank's gradients count as zeros
        theirs.step()
        theirs.zero_grad()
    with sherd.join(model, optimizer):
        trained(model, optimizer, batches(3) if dist.get_rank() == 0 else [])
    assert_as_plain(model, plain)


@on_processes(2)
def test_a_guarded_step_is_made():
    plain, model = stack(), sharded(stack(), comm_policy=CommPolicy(divergence="join"))
    trained(plain, muon(plain), batches(3))
    optimizer = muon(model)
    sherd.step_in_backward(model, optimizer)
    for batch in batches(3):
        with sherd.step(model, optimizer) as attempt:
            model(batch).square().mean().backward()
            optimizer.step()
        assert not attempt.skipped
        optimizer.zero_grad()
    assert_as_plain(model, plain)


@on_threads(2, front=["shard", "flat"])
def test_parameters_that_come_late_are_stepped(front):
    plain, model = stack(), sharded(stack(), front)
    optimizers = [muon(plain), muon(model)]
    sherd.step_in_backward(model, optimizers[1])
    for late in (False, True):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each[2].weight.requires_grad_(late)
            trained(each, optimizer, batches(2))
    assert_as_plain(model, plain)


@on_threads(2)
def test_parameters_that_refresh_finds_are_stepped():
    plain, model = _LanguageModel(), sherd.fully_shard(_LanguageModel())
    for each in (plain, model):
        optimizer = muon(each, adamw={"lr": 0.1})
        if each is model:
            sherd.step_in_backward(model, optimizer)
        grown(each, optimizer)
    assert_as_plain(model, plain)


@on_threads(2, front=["shard", "flat"])
def test_the_last_of_several_backwards_steps(front):
    plain, model = stack(), sharded(stack(), front)
    optimizers = [muon(plain), muon(model)]
    sherd.step_in_backward(model, optimizers[1])
    for first in (0, 2):
        for batch in batches(4)[first : first + 2]:
            plain(batch).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        with sherd.accumulate(model, 2):
            for batch in batches(4)[first : first + 2]:
                model(batch).square().mean().backward()
        assert_as_plain(model, plain)


@on_threads(2, front=["shard", "flat"])
def test_shards_in_host_memory_are_stepped(front):
    plain, model = stack(), sharded(stack(), front, offload_policy=sherd.CPUOffloadPolicy())
    trained(plain, muon(plain), batches(3))
    optimizer = muon(model)
    sherd.step_in_backward(model, optimizer)
    trained(model, optimizer, batches(3))
    assert_as_plain(model, plain)
