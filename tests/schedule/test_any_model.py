"""The schedule is right for any tree of units, any choices and any sequence of steps."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    Event,
    GradientsReady,
    GroupPassed,
)
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, UnitSpec
from tests.schedule.model import StrictEngine, forward, specs, step


@dataclass(frozen=True)
class Call:
    """A unit's forward, with the forwards inside it. `checkpointed`: backward runs it again; `passes`: an input needs a
    gradient, so autograd can be seen to leave the unit; `groups`: how many of the unit's groups have their gradients
    before the units inside are reached."""

    unit: int
    inside: tuple["Call", ...]
    checkpointed: bool
    passes: bool
    groups: int = 0


def forward_of(call: Call) -> list[Event]:
    inside = [event for each in call.inside for event in forward_of(each)]
    return [BeforeForward(call.unit), *inside, AfterForward(call.unit)]


def backward_of(call: Call) -> list[Event]:
    """Autograd enters at the outputs, meets the units inside in reverse, and leaves at the inputs."""
    again: list[Event] = []
    if call.checkpointed:
        again = [BeforeForward(call.unit, recomputing=True), AfterForward(call.unit, recomputing=True)]
    inside = [event for each in reversed(call.inside) for event in backward_of(each)]
    left = [AfterBackward(call.unit)] if call.passes else []
    passed = [GroupPassed(call.unit, group) for group in range(call.groups)][::-1]
    return [*again, BeforeBackward(call.unit), *passed, *inside, GradientsReady(call.unit), *left]


@st.composite
def calls(draw: st.DrawFn, units: list[int]) -> tuple[Call, ...]:
    """Some of `units` in some order, some of them inside others, each called once."""
    order = draw(st.permutations(units))[: draw(st.integers(0, len(units)))]
    made: list[Call] = []
    for unit in order:
        nested = tuple(made[-draw(st.integers(0, 2)) :]) if made and draw(st.booleans()) else ()
        made = made[: len(made) - len(nested)]
        checkpointed = draw(st.booleans()) and not nested
        made.append(Call(unit, nested, checkpointed, draw(st.booleans()), draw(st.integers(0, 2))))
    return tuple(made)


@st.composite
def passes(draw: st.DrawFn, num_units: int) -> list[Event]:
    """One root forward, and a backward unless it was an evaluation."""
    root = Call(0, draw(calls(list(range(1, num_units)))), False, False, draw(st.integers(0, 2)))
    trains = draw(st.booleans())
    events = [*forward_of(root), EndForward(trains)]
    return [*events, *backward_of(root), EndBackward(draw(st.booleans()))] if trains else events


def unit_specs() -> st.SearchStrategy[UnitSpec]:
    return st.builds(
        UnitSpec,
        unsharded_bytes=st.integers(0, 9),
        after_forward=st.sampled_from(Keep),
        reshard_after_backward=st.booleans(),
        reduces=st.booleans(),
        num_parts=st.integers(1, 3),
    )


limits = st.builds(
    Limits,
    forward_depth=st.integers(0, 3),
    backward_depth=st.integers(0, 3),
    bytes_in_flight=st.none() | st.integers(0, 20),
    reduce_buffers=st.integers(0, 3),
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[UnitSpec, ...], Limits, list[list[Event]]]:
    """A model's specs, its limits, and two to five passes that need not be alike."""
    num_units = draw(st.integers(1, 6))
    chosen = draw(st.lists(unit_specs(), min_size=num_units, max_size=num_units))
    different = draw(st.lists(passes(num_units), min_size=1, max_size=3))
    played = draw(st.lists(st.sampled_from(different), min_size=2, max_size=5))
    return tuple(chosen), draw(limits), played


@pytest.mark.front("A schedule that is tested by itself")
@given(programs())
def test_units_are_whole_while_they_compute_and_then_sharded_but_what_is_to_stay_and_all_gradients_are_reduced(program):
    """By the end of a backward; and answers that are cached are those that fresh ones would be."""
    units, bounds, played = program
    engine = StrictEngine(units, bounds)
    for events in played:
        engine.run(events)  # the engine asserts the first and the last after every event
        assert all(not units[unit].reduces for unit in engine.collected)
        if isinstance(events[-1], EndBackward):
            for unit, spec in enumerate(units):
                may_stay = not spec.reshard_after_backward and engine.live[unit] is Live.UNSHARDED
                assert engine.live[unit] is Live.SHARDED or may_stay
            if events[-1].last:
                assert engine.reducing == set()


@given(programs())
def test_a_step_that_is_played_again_needs_no_new_states(program):
    units, bounds, (events, *_) = program
    schedule = Schedule(units, bounds)
    for event in events * 3:
        schedule.on(event)
    known = len(schedule._nodes)
    for event in events * 3:
        schedule.on(event)
    assert len(schedule._nodes) == known


@given(programs())
def test_no_more_is_live_than_what_computes_what_is_kept_and_what_the_depth_runs_ahead(program):
    units, bounds, played = program
    engine = StrictEngine(units, bounds)
    largest = sorted((spec.unsharded_bytes for spec in units), reverse=True)
    depth = max(bounds.forward_depth, bounds.backward_depth)
    for events in played:
        for event in events:
            engine.run([event])
            state = engine.schedule.state
            ahead = [unit for unit, live in engine.live.items() if live is Live.GATHERING]
            assert len(ahead) <= depth
            assert state.bytes_in_flight <= sum(largest[:depth])
            if bounds.bytes_in_flight is not None:
                assert state.bytes_in_flight <= bounds.bytes_in_flight
            for unit, live in engine.live.items():
                kept = units[unit].after_forward in (Keep.FOR_BACKWARD, Keep.ALWAYS)
                kept = kept or not units[unit].reshard_after_backward
                assert live is not Live.UNSHARDED or unit in engine.needed or kept, f"unit {unit} is whole for nobody"


def test_a_chain_of_equal_units_never_has_more_live_than_its_root_one_block_and_the_depth():
    for depth in (0, 1, 2, 3):
        engine = StrictEngine(specs(9), Limits(forward_depth=depth, backward_depth=depth))
        peak = 0
        for event in step(9) * 3:
            engine.run([event])
            peak = max(peak, engine.bytes_live)
        assert peak == 100 * (2 + depth)


def test_groups_that_go_one_by_one_need_no_more_states_than_one_that_goes():
    """A layer of experts is a unit of hundreds of groups. Where they are gathered one by one, than three that go."""
    num_states = []
    for few, num_parts in ((1, 1), (3, 301)):
        for num_groups in (few, 300):
            engine = StrictEngine(tuple(replace(spec, num_parts=num_parts) for spec in specs(3)))
            events = backward_of(Call(2, (), False, True, num_groups))
            engine.run([*forward([1, 2]), BeforeBackward(0), *events, EndBackward()] * 3)
            num_states.append(len(engine.schedule._nodes))
    assert num_states[0] == num_states[1]
    assert num_states[2] == num_states[3]


def test_the_graph_of_states_is_dropped_before_a_model_that_never_repeats_fills_the_memory(monkeypatch):
    monkeypatch.setattr("sherd.schedule.schedule.MOST_NODES", 8)
    engine = StrictEngine(specs(9))
    for _ in range(3):
        engine.run(step(9))
        assert len(engine.schedule._nodes) <= 8
