"""Exact float32 masters of bfloat16 parameters: those of a training whose parameters are float32, to the last bit."""

import copy

import pytest
import torch
from torch import nn, optim

import sherd
from sherd import Blocks, Flat, MixedPrecisionPolicy, OffloadPolicy, Owned, fully_shard
from sherd.engine import Unit
from sherd.engine.state.masters import join, split
from sherd.errors import OptimizerError, PolicyError
from tests.support.models import chain
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line

MASTERS = OffloadPolicy(masters="device")


def test_a_master_comes_back_from_the_weight_the_low_bits_and_the_carry():
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    ties, ones = patterns | 0x8000, patterns | 1
    masters = torch.cat([patterns, ties, ones, ties + 1, ties - 1, torch.zeros(3, dtype=torch.int32)])
    masters = masters.view(torch.float32)
    weight, low, carries = split(masters)
    assert torch.equal(weight.view(torch.int16), masters.to(torch.bfloat16).view(torch.int16))
    assert carries.numel() == -(-len(masters) // 8)
    back = join(weight, low, carries)
    numbers = ~masters.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], masters.view(torch.int32)[numbers])
    assert back[~numbers].isnan().all()


def masters_of(model):
    """The masters of each parameter on this rank, by name; the shards where there are none."""
    found = {}
    for unit in Unit.below(model):
        for record in unit.parameters:
            masters, extent = record.masters or (None, None)
            found[record.name] = record.local.reshape(-1).clone() if masters is None else masters.part(extent)
    return found


def sharded(policy, dtype, placement=None, reduce_dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = chain(2, 24).append(nn.Linear(24, 5)).to(torch.bfloat16).to(dtype)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for unit in (*model[:2], model):
        fully_shard(unit, offload_policy=policy, placement=placement, mp_policy=precision, **options)
    return model


def made(kind, model, flattens=False):
    optimizer = sherd.Muon(model, lr=1e-2) if kind is sherd.Muon else kind(model.parameters(), lr=1e-2)
    if kind is optim.SGD:
        optimizer.param_groups[0]["momentum"] = 0.9
    return sherd.flatten_optimizer(optimizer) if flattens else optimizer


def steps(model, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(2 * number + torch.distributed.get_rank())
        x = torch.randn(3, 24, generator=generator).to(torch.bfloat16)
        model(x).float().square().mean().backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(plain, model):
    exact, found = masters_of(plain), masters_of(model)
    assert exact.keys() == found.keys()
    for name, values in exact.items():
        assert torch.equal(values, found[name]), name
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert other.dtype is torch.bfloat16
        assert torch.equal(one.to_local().to(torch.bfloat16), other.to_local())


KINDS = [
    (optim.AdamW, None, False),
    (optim.AdamW, Flat(), True),
    (optim.SGD, Blocks(2), False),
    (sherd.Muon, None, False),
    (sherd.Muon, Owned(), False),
    (optim.Adafactor, Owned(), False),
]


@pytest.mark.values
@pytest.mark.parametrize(("kind", "placement", "flattens"), KINDS)
@on_threads(2)
def test_masters_are_those_of_float32_parameters(kind, placement, flattens):
    for reduce_dtype in (torch.bfloat16, torch.float32):
        plain = sharded(OffloadPolicy(), torch.float32, placement, reduce_dtype)
        model = sharded(MASTERS, torch.bfloat16, placement, reduce_dtype)
        both = [(each, made(kind, each, flattens)) for each in (plain, model)]
        for each, optimizer in both:
            steps(each, optimizer, range(6))
        assert_same(plain, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, sherd.Muon])
@on_threads(2)
def test_they_are_so_after_a_thousand_steps(kind):
    both = [
        (model, made(kind, model))
        for model in (sharded(OffloadPolicy(), torch.float32), sharded(MASTERS, torch.bfloat16))
    ]
    for model, optimizer in both:
        steps(model, optimizer, range(1000))
    assert_same(both[0][0], both[1][0])


@on_threads(2)
def test_what_a_user_writes_is_its_own_master():
    model = sharded(MASTERS, torch.bfloat16)
    optimizer = made(optim.AdamW, model)
    steps(model, optimizer, range(2))
    weight = model[0].up.weight
    with torch.no_grad():
        weight.fill_(0.5)
    assert torch.equal(masters_of(model)["0.up.weight"], torch.full((weight.to_local().numel(),), 0.5))
    plain = masters_of(model)["0.down.weight"]
    assert not torch.equal(plain, plain.to(torch.bfloat16).float())


@on_threads(2)
def test_they_stay_when_the_unit_is_grouped_again():
    model = sharded(MASTERS, torch.bfloat16)
    optimizer = made(optim.AdamW, model)
    steps(model, optimizer, range(2))
    before = masters_of(model)
    for unit in Unit.below(model):
        unit.regroup()
    after = masters_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_threads(2)
def test_a_step_of_all_parameters_in_one_line_is_refused():
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    fully_shard(model, offload_policy=MASTERS)
    optimizer = optim.LBFGS(model.parameters())
    model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert "leave masters out" in one_line(OptimizerError, optimizer.step, lambda: 0.0)


@on_threads(2)
def test_only_bfloat16_parameters_have_masters():
    said = one_line(PolicyError, fully_shard, nn.Linear(4, 4), offload_policy=MASTERS)
    assert "weight" in said
    assert "torch.float32" in said
    assert "model.to(torch.bfloat16)" in said
    model = nn.Linear(4, 4).to(torch.bfloat16)
    model.count = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    fully_shard(model, offload_policy=MASTERS)  # what is not trained needs none


class Subclass(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def adagrad(model):
    return optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.5)


@on_threads(2)
def test_masters_of_other_optimizers():
    optim.AdamW([nn.Parameter(torch.ones(1))])  # torch prepares a class's step with its first object
    for kind in (adagrad, lambda model: Subclass(model.parameters(), lr=1e-2)):
        both = sharded(OffloadPolicy(), torch.float32), sharded(MASTERS, torch.bfloat16)
        for model in both:
            steps(model, kind(model), range(4))
        assert_same(*both)


@on_threads(2)
def test_a_closure_meets_shards():
    def trained(model):
        optimizer = made(sherd.Muon, model)
        for number in range(4):

            def closure(number=number):
                optimizer.zero_grad()
                loss = model(torch.full((3, 24), number / 4).to(torch.bfloat16)).float().square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
        return model

    assert_same(trained(sharded(OffloadPolicy(), torch.float32)), trained(sharded(MASTERS, torch.bfloat16)))


@on_threads(2)
def test_they_stay_when_the_model_is_moved_or_copied():
    plain, model = sharded(OffloadPolicy(), torch.float32), sharded(MASTERS, torch.bfloat16)
    both = [[each, made(optim.AdamW, each)] for each in (plain, model)]
    for each, optimizer in both:
        steps(each, optimizer, range(2))
        each.to("cpu", torch.bfloat16 if each is model else torch.float32)
        steps(each, optimizer, range(2, 4))
    assert_same(plain, model)
    copied = copy.deepcopy(model)
    assert_same(plain, copied)
    for each in (plain, copied):
        steps(each, made(optim.SGD, each), range(4, 6))
    assert_same(plain, copied)


@on_threads(2)
def test_they_begin_with_weights_that_come_after_the_meta_device():
    model = chain(1, 24).to("meta", torch.bfloat16)
    fully_shard(model, offload_policy=MASTERS)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.5)
    steps(model, made(optim.SGD, model), range(1))


@on_threads(2)
def test_a_flat_parameter_has_masters():
    def wrapped(policy, dtype, **options):
        return sherd.FullyShardedDataParallel(chain(1, 24).to(dtype), cpu_offload=policy, **options)

    precision = sherd.MixedPrecision(param_dtype=torch.bfloat16)
    plain = wrapped(OffloadPolicy(), torch.float32, mixed_precision=precision)
    with torch.no_grad():
        for each in plain.parameters():
            each.copy_(each.to(torch.bfloat16))
    model = wrapped(MASTERS, torch.bfloat16)
    for each in (plain, model):
        steps(each, made(optim.AdamW, each), range(3))
    assert_same(plain, model)
