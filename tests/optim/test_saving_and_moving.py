"""The state of a flat optimizer goes anywhere that the plain one's goes, and stays when buffers move."""

import copy
import functools
import io
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from sherd.engine.state.parameter import record_of
from sherd.optim import flatten_optimizer
from tests.optim.twins import CLOSE, NAMES, Pair, adamw, backward, groups, run, spans_of
from tests.support.comparing import assert_same, whole
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

LAYOUTS = [("shard", 2), ("flat", 1), ("flat", 3), ("blocks", 2), ("owned", 2)]
momentum = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
fused = functools.partial(optim.AdamW, lr=0.1, fused=True, amsgrad=True)
MAKE = {"adamw": adamw, "momentum": momentum, "fused": fused}


def made(make, placement, flat):
    model = sharded(Pair(), placement)
    optimizer = make(groups(model))
    return model, flatten_optimizer(optimizer) if flat else optimizer


def held(value):
    """What this rank holds of a tensor, and how it is cut: compares tensors that are cut alike without a collective."""
    return {"placements": value.placements, "local": value.to_local()} if isinstance(value, DTensor) else value


def held_by(model, optimizer):
    """Every parameter by its name, and its state: of shards, what this rank holds of them."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[each] for name, each in named.items() if each in optimizer.state}
    return {
        "parameters": {name: held(each.detach()) for name, each in named.items()},
        "state": {name: {key: held(value) for key, value in state.items()} for name, state in states.items()},
    }


def after_two_steps(make, placement):
    """By whether it is flat: a model and its optimizer after steps in which gradients were missing."""
    found = {}
    for flat in (True, False):
        # `Owned` has another model begin on another rank, unless the one before has run.
        found[flat] = model, optimizer = made(make, placement, flat)
        assert optimizer.state_dict()["state"] == {}
        run(model, optimizer, range(2), lambda step: NAMES[3:] if step == 1 else NAMES[:-2])
    return found


def assert_same_state_dict(flat, plain):
    """Keys, groups, types and layouts; what tensors hold is close."""
    assert flat["param_groups"] == plain["param_groups"]
    assert list(flat["state"]) == sorted(plain["state"]), "in one order on all ranks"
    assert_same(whole(flat["state"]), whole(plain["state"]), **CLOSE)
    for index, expected in plain["state"].items():
        for key, value in expected.items():
            found = flat["state"][index][key]
            assert type(found) is type(value)
            if isinstance(value, DTensor):
                assert found.placements == value.placements
                assert found.to_local().shape == value.to_local().shape


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [(True, True), (True, False), (False, True)]


def go_on(make, placement, through):
    """Train 2 steps, and 2 more: with the optimizer itself, and with one of each form that takes its state."""
    sources = after_two_steps(make, placement)
    assert_same_state_dict(sources[True][1].state_dict(), sources[False][1].state_dict())
    taken = {}
    for saved_flat, loaded_flat in WAYS:
        model, optimizer = made(make, placement, loaded_flat)
        model.load_state_dict(sources[saved_flat][0].state_dict())
        optimizer.load_state_dict(through(sources[saved_flat][1].state_dict()))
        run(model, optimizer, range(2, 4))
        taken[f"flat: {saved_flat} to {loaded_flat}"] = (model, optimizer)
    assert_gone_on_alike(taken, *sources[False])


def assert_gone_on_alike(taken, model, optimizer):
    run(model, optimizer, range(2, 4))
    expected = held_by(model, optimizer)
    for way, (other, its_own) in taken.items():
        assert_same(held_by(other, its_own), expected, way, **CLOSE)


@pytest.mark.values
@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", MAKE)
def test_either_form_has_the_state_of_the_other_and_goes_on_from_it(threads, kind, placement, num_ranks):
    threads(num_ranks).run(go_on, MAKE[kind], placement, copy.deepcopy)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@pytest.mark.parametrize("placement", ["shard", "flat"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_saved_state_goes_on_in_either_form(threads, kind, placement):
    threads(2).run(go_on, MAKE[kind], placement, through_a_file)


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("owned", 2)])
@on_threads()
def test_a_checkpoint_full_or_sharded_goes_on_in_either_form(tmp_path, placement):
    sources = after_two_steps(adamw, placement)
    taken = {}
    for full, (saved_flat, loaded_flat) in itertools.product((True, False), WAYS):
        options = StateDictOptions(full_state_dict=full)
        first, before = sources[saved_flat]
        saved = get_optimizer_state_dict(first, before, options=options)
        assert set(saved["state"]) == set(NAMES)
        model, optimizer = made(adamw, placement, loaded_flat)
        model.load_state_dict(first.state_dict())
        if full:
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=options)
        else:
            checkpoint = tmp_path / f"{saved_flat}_{loaded_flat}"
            dcp.save(saved, checkpoint_id=checkpoint)
            wanted = get_optimizer_state_dict(model, optimizer, options=options)
            dcp.load(wanted, checkpoint_id=checkpoint)
            set_optimizer_state_dict(model, optimizer, wanted, options=options)
        run(model, optimizer, range(2, 4))
        taken[f"full: {full}, flat: {saved_flat} to {loaded_flat}"] = (model, optimizer)
    assert_gone_on_alike(taken, *sources[False])


def to_double_and_back(model, optimizer):
    model.double()
    model.float()


def to_double_before_the_step(model, optimizer):
    backward(model, 7)
    model.double()
    model.float()
    optimizer.step()
    optimizer.zero_grad()


def regroup(model, optimizer):
    for parameter in model.parameters():
        record_of(parameter).owner.regroup()


def load_the_same(model, optimizer):
    model.load_state_dict(model.state_dict())


def freeze_and_thaw(model, optimizer):
    model.first.requires_grad_(False)
    backward(model, 5)
    optimizer.step()
    optimizer.zero_grad()
    model.first.requires_grad_(True)


MOVES = [to_double_and_back, to_double_before_the_step, regroup, load_the_same, freeze_and_thaw]


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("owned", 2)])
@on_threads()
def test_runs_follow_the_buffers(placement):
    """One move after the other, and a step or two after each: as the plain optimizer does."""
    model, flat = made(adamw, placement, True)
    run(model, flat, range(2))
    other, plain = made(adamw, placement, False)
    run(other, plain, range(2))
    for number, move in enumerate(MOVES):
        for each, optimizer in ((model, flat), (other, plain)):
            move(each, optimizer)
            run(each, optimizer, range(number + 2, number + 3 + (move is MOVES[-1])))
        assert_same(held_by(model, flat), held_by(other, plain), move.__name__, **CLOSE)
        for each in (each for each in spans_of(flat) if each.flat.numel()):
            assert each.flat.data_ptr() == each.shards[0].to_local().data_ptr()
