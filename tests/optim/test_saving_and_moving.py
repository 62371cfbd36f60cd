"""Does the state of a flat optimizer go anywhere that the plain one's goes, and stay when buffers move?"""

import functools
import io

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

from sherd.engine.parameter import record_of
from sherd.optim import flatten_optimizer
from tests.optim.twins import (
    CLOSE,
    NAMES,
    assert_same,
    backward,
    groups,
    pair,
    parameters_of,
    run,
    runs_of,
    shard,
    state_of,
    whole,
)

LAYOUTS = [("shard", 2), ("flat", 1), ("flat", 3), ("rows", 2), ("whole", 2)]
adamw = functools.partial(optim.AdamW, lr=0.1, foreach=True)
momentum = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
fused = functools.partial(optim.AdamW, lr=0.1, fused=True, amsgrad=True)
MAKE = {"adamw": adamw, "momentum": momentum, "fused": fused}


def made(make, placement, flat):
    model = shard(pair(), placement)
    optimizer = make(groups(model))
    return model, flatten_optimizer(optimizer) if flat else optimizer


def compare_state_dicts(make, placement):
    """After steps in which gradients were missing."""
    found = {}
    for flat in (True, False):
        model, optimizer = made(make, placement, flat)
        empty = optimizer.state_dict()
        assert empty["state"] == {}
        run(model, optimizer, range(3), lambda step: NAMES[3:] if step == 1 else NAMES[:-2])
        found[flat] = optimizer.state_dict()
    assert found[True]["param_groups"] == found[False]["param_groups"]
    assert list(found[True]["state"]) == sorted(found[False]["state"]), "in one order on all ranks"
    for index, expected in found[False]["state"].items():
        state = found[True]["state"][index]
        assert set(state) == set(expected)
        for key, value in expected.items():
            assert type(state[key]) is type(value)
            assert state[key].dtype == value.dtype
            if isinstance(value, DTensor):
                assert state[key].placements == value.placements
                assert state[key].to_local().shape == value.to_local().shape
            torch.testing.assert_close(whole(state[key]), whole(value), **CLOSE)


@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", MAKE)
def test_the_state_dict_is_that_of_the_plain_optimizer(threads, kind, placement, num_ranks):
    threads(num_ranks).run(compare_state_dicts, MAKE[kind], placement)


def in_memory(state, optimizer, model):
    optimizer.load_state_dict(state)


def through_a_file(state, optimizer, model):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=False))


def go_on(make, placement, load, saved_flat, loaded_flat):
    """Train 2 steps and 2 more; then again with the state taken to another optimizer in between."""
    model, optimizer = made(make, placement, False)
    run(model, optimizer, range(4))
    first, before = made(make, placement, saved_flat)
    run(first, before, range(2))
    second, after = made(make, placement, loaded_flat)
    second.load_state_dict(first.state_dict())
    load(before.state_dict(), after, second)
    run(second, after, range(2, 4))
    assert_same(parameters_of(second), parameters_of(model), **CLOSE)
    assert_same(state_of(second, after), state_of(model, optimizer), **CLOSE)


WAYS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize(("placement", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", MAKE)
def test_either_form_goes_on_from_the_state_of_the_other(threads, kind, placement, num_ranks):
    for way in WAYS:
        threads(num_ranks).run(go_on, MAKE[kind], placement, in_memory, *way)


@pytest.mark.parametrize("placement", ["shard", "flat"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_saved_state_goes_on_in_either_form(world, kind, placement):
    for way in WAYS:
        world(2).run(go_on, MAKE[kind], placement, through_a_file, *way)


def go_on_from_a_checkpoint(make, placement, folder, full, saved_flat, loaded_flat):
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = made(make, placement, False)
    run(model, optimizer, range(4))
    first, before = made(make, placement, saved_flat)
    run(first, before, range(2))
    saved = get_optimizer_state_dict(first, before, options=options)
    assert set(saved["state"]) == set(NAMES)
    second, after = made(make, placement, loaded_flat)
    second.load_state_dict(first.state_dict())
    if full:
        set_optimizer_state_dict(second, after, saved, options=options)
    else:
        dcp.save(saved, checkpoint_id=folder)
        wanted = get_optimizer_state_dict(second, after, options=options)
        dcp.load(wanted, checkpoint_id=folder)
        set_optimizer_state_dict(second, after, wanted, options=options)
    run(second, after, range(2, 4))
    assert_same(parameters_of(second), parameters_of(model), **CLOSE)
    assert_same(state_of(second, after), state_of(model, optimizer), **CLOSE)


@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("whole", 2)])
def test_a_checkpoint_goes_on_in_either_form(world, tmp_path, placement, num_ranks, full):
    for number, way in enumerate(WAYS):
        world(num_ranks).run(go_on_from_a_checkpoint, adamw, placement, str(tmp_path / str(number)), full, *way)


def train_on(placement, move):
    """Two steps, a move, two steps: as the plain optimizer does."""
    trained = []
    for flat in (True, False):
        model, optimizer = made(adamw, placement, flat)
        run(model, optimizer, range(2))
        move(model, optimizer)
        run(model, optimizer, range(2, 4))
        trained.append((model, optimizer))
    (model, flat), (other, plain) = trained
    tolerance = CLOSE if next(model.parameters()).dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}
    assert_same(parameters_of(model), parameters_of(other), **tolerance)
    assert_same(state_of(model, flat), state_of(other, plain), **tolerance)
    for each in (each for each in runs_of(flat) if each.flat.numel()):
        assert each.flat.data_ptr() == each.seats[0].group.rest[each.seats[0].extent.start :].data_ptr()


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


@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 3), ("whole", 2)])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_runs_follow_the_buffers(threads, move, placement, num_ranks):
    threads(num_ranks).run(train_on, placement, move)


def train_scaled(placement, kind):
    """The second step overflows on every rank, and is skipped."""
    trained = []
    for flat in (True, False):
        model, optimizer = made(MAKE[kind], placement, flat)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(5):
            # One rank's overflow is everybody's.
            factor = float("inf") if step == 1 and torch.distributed.get_rank() == 0 else 1.0
            scaler.scale(model(step, NAMES, factor)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
        trained.append((model, optimizer))
    (model, flat), (other, plain) = trained
    assert_same(parameters_of(model), parameters_of(other), **CLOSE)
    assert_same(state_of(model, flat), state_of(other, plain), **CLOSE)
    assert all(torch.isfinite(value).all() for value in parameters_of(model).values())


@pytest.mark.parametrize("kind", ["adamw", "fused"])
@pytest.mark.parametrize(("placement", "num_ranks"), [("shard", 2), ("flat", 1), ("flat", 2)])
def test_a_scaled_loss_that_overflows_skips_the_step_everywhere(threads, kind, placement, num_ranks):
    threads(num_ranks).run(train_scaled, placement, kind)
