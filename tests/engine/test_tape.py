"""What a settled step plays is what the schedule decides, bound once."""

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd import FSDPModule, fully_shard, refresh
from sherd.engine.run.tape import Tape, bound
from sherd.schedule.schedule import Schedule
from tests.schedule.test_any_model import programs
from tests.support.ranks.bodies import on_threads


def play(tape, event):
    tape.play(type(event), *(getattr(event, each.name) for each in fields(event)))


@given(programs())
def test_playing_the_tape_is_carrying_out_the_decisions(program):
    units, limits, passes = program
    played, schedule = [], Schedule(units, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sherd.engine.run.tape.bound", lambda action, unit: partial(played.append, (unit.id, action)))
        tape = Tape(Schedule(units, limits), [SimpleNamespace(id=index) for index in range(len(units))], {})
        for event in [event for events in passes * 2 for event in events]:
            play(tape, event)
            decided = [(action.unit, action) for action in schedule.on(event)]
            assert played == decided
            played.clear()


@given(programs())
def test_an_observer_sees_each_event_around_its_actions_while_it_is_there(program):
    units, limits, passes = program
    seen, done = [], []

    def perform(action, call):
        seen.append(action)
        call()

    observer = SimpleNamespace(begins=seen.append, perform=perform, ended=seen.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sherd.engine.run.tape.bound", lambda action, unit: partial(done.append, action))
        schedule = Schedule(units, limits)
        tape = Tape(Schedule(units, limits), [SimpleNamespace(id=index) for index in range(len(units))], {})
        for number, events in enumerate(passes * 2):
            decided = [(event, *schedule.on(event), event) for event in events]
            if number % 2:
                with tape.observed(observer):
                    for event in events:
                        play(tape, event)
                assert seen == [each for all_of in decided for each in all_of]
            else:
                for event in events:
                    play(tape, event)
                assert not seen
            assert done == [action for _, *actions, _ in decided for action in actions]
            seen.clear()
            done.clear()


class Counted:
    """How many calls were bound since it was last asked."""

    def __init__(self, patch):
        self._number = 0
        patch.setattr("sherd.engine.run.tape.bound", self._bound)

    def _bound(self, action, unit):
        self._number += 1
        return bound(action, unit)

    def since(self):
        number, self._number = self._number, 0
        return number


class Blocks(nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def blocks(**how):
    torch.manual_seed(0)
    model = Blocks(**how)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def step(model):
    model(torch.ones(2, 4)).sum().backward()


def settle(model):
    for _ in range(4):
        step(model)


@on_threads(1)
def test_a_settled_step_binds_nothing_and_a_change_binds_what_is_new_once(monkeypatch):
    counted, model = Counted(monkeypatch), blocks()
    settle(model)
    assert counted.since()
    step(model)
    assert counted.since() == 0

    def accumulates():
        for is_last in (False, True):
            FSDPModule.set_requires_gradient_sync(model, is_last)
            step(model)

    def evaluates():
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model.train()
        step(model)

    def keeps_and_frees():
        for reshards in (False, True):
            model.set_reshard_after_backward(reshards)
            step(model)
            step(model)

    for change in (accumulates, evaluates, keeps_and_frees):
        change()
        counted.since()
        for _ in range(2):  # the ways are known now, and their calls are good whatever was chosen in between
            change()
        assert counted.since() == 0, change


@on_threads(1)
def test_calls_stay_good_when_groups_are_made_anew_and_shards_move(monkeypatch):
    counted, model = Counted(monkeypatch), blocks()
    settle(model)
    for change in (
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: [each.data.copy_(each.data) for each in model.parameters()],
    ):
        change()
        step(model)  # with other groups, or other memory, and the same schedule
        counted.since()
        step(model)
        assert counted.since() == 0


@on_threads(1)
def test_a_refresh_and_a_new_root_begin_a_tape_of_their_own(monkeypatch):
    counted, model = Counted(monkeypatch), blocks()
    settle(model)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    refresh(model)
    counted.since()
    step(model)
    assert counted.since()
    around = fully_shard(nn.Sequential(model))
    step(around)
    assert counted.since()
    settle(around)
    counted.since()
    step(around)
    assert counted.since() == 0


@on_threads(1)
def test_a_recomputation_is_played_as_well(monkeypatch):
    counted, model = Counted(monkeypatch), blocks(is_checkpointed=True)
    settle(model)
    counted.since()
    step(model)
    assert counted.since() == 0


@on_threads(1)
def test_after_an_exception_the_known_calls_are_played(monkeypatch):
    counted, model = Counted(monkeypatch), blocks()
    settle(model)

    def fails():
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        step(model)

    fails()
    step(model)
    counted.since()
    fails()
    step(model)
    assert counted.since() == 0
