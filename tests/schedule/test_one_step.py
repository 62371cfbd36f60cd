"""Which actions one step of a nested model asks for, in the first step and once the order is learnt."""

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    Await,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    FinishReduce,
    Free,
    Gather,
    GradientsReady,
    Reduce,
    Shrink,
)
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, UnitSpec
from tests.schedule.model import answers, backward, forward, specs, step


def learnt(units: tuple[UnitSpec, ...], limits: Limits = Limits()) -> Schedule:
    """A schedule that has lived through one step."""
    schedule = Schedule(units, limits)
    answers(schedule, step(len(units)))
    return schedule


def answer_by_event(schedule: Schedule, events: list) -> list[tuple]:
    return [(event, schedule.on(event)) for event in events]


# A step of a kept root and two blocks, from the end of its forward on.
BACKWARD = [
    (EndForward(), ()),
    (BeforeBackward(0), (Gather(2),)),
    (BeforeBackward(2), (Await(2), Gather(1))),
    (GradientsReady(2), (Reduce(2),)),
    (AfterBackward(2), (Free(2),)),
    (BeforeBackward(1), (Await(1),)),
    (GradientsReady(1), (FinishReduce(2), Reduce(1))),
    (AfterBackward(1), (Free(1),)),
    (GradientsReady(0), (FinishReduce(1), Reduce(0))),
    (EndBackward(), (Free(0), FinishReduce(0))),
]


def test_the_first_step_gathers_each_unit_as_it_comes_and_guesses_the_order_of_backward():
    assert answer_by_event(Schedule(specs(3)), step(3)) == [
        (BeforeForward(0), (Gather(0), Await(0))),
        (BeforeForward(1), (Gather(1), Await(1))),
        (AfterForward(1), (Free(1),)),
        (BeforeForward(2), (Gather(2), Await(2))),
        (AfterForward(2), (Free(2),)),
        (AfterForward(0), ()),
        *BACKWARD,
    ]


def test_from_the_second_step_on_each_unit_is_gathered_behind_the_one_before_it():
    schedule = learnt(specs(3))
    for _ in range(2):
        assert answer_by_event(schedule, step(3)) == [
            (BeforeForward(0), (Gather(0), Await(0), Gather(1))),
            (BeforeForward(1), (Await(1), Gather(2))),
            (AfterForward(1), (Free(1),)),
            (BeforeForward(2), (Await(2),)),
            (AfterForward(2), (Free(2),)),
            (AfterForward(0), ()),
            *BACKWARD,
        ]


# Prefetching


def test_each_direction_runs_as_many_units_ahead_as_its_depth_says():
    for depth, ahead in ((0, ()), (1, (1,)), (2, (1, 2)), (9, (1, 2, 3, 4))):
        schedule = learnt(specs(5), Limits(forward_depth=depth))
        assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0), *map(Gather, ahead))
    for depth, ahead in ((0, ()), (1, (4,)), (2, (4, 3))):
        schedule = learnt(specs(5), Limits(backward_depth=depth))
        answers(schedule, forward(range(1, 5)))
        assert schedule.on(BeforeBackward(0)) == tuple(map(Gather, ahead))


def test_the_budget_of_bytes_in_flight_stops_a_prefetch_that_depth_would_allow_and_no_gather_that_is_needed():
    units = (UnitSpec(0), UnitSpec(100), UnitSpec(100), UnitSpec(100))
    schedule = learnt(units, Limits(forward_depth=3, bytes_in_flight=200))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0), Gather(1), Gather(2))
    assert schedule.state.bytes_in_flight == 200
    # A small unit still fits behind a large one that does not.
    schedule = learnt((UnitSpec(0), UnitSpec(1000), UnitSpec(50)), Limits(forward_depth=2, bytes_in_flight=100))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0), Gather(2))
    schedule = learnt((UnitSpec(0), UnitSpec(1000)), Limits(bytes_in_flight=0))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0))
    assert schedule.on(BeforeForward(1)) == (Gather(1), Await(1))


def test_a_list_of_the_users_own_be_it_empty_overrides_depth_budget_and_learnt_order():
    units = (UnitSpec(10, forward_prefetch=(3, 2)), *[UnitSpec(10)] * 3)
    schedule = Schedule(units, Limits(forward_depth=0, bytes_in_flight=0))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0), Gather(3), Gather(2))
    schedule = learnt((UnitSpec(10, forward_prefetch=()), *[UnitSpec(10)] * 2))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0))
    assert schedule.on(BeforeForward(1)) == (Gather(1), Await(1), Gather(2))
    schedule = learnt((UnitSpec(10, Keep.FOR_BACKWARD, backward_prefetch=(1,)), *[UnitSpec(10)] * 2))
    answers(schedule, forward([1, 2]))
    assert schedule.on(BeforeBackward(0)) == (Gather(1),)


def test_what_was_gathered_ahead_and_never_used_or_kept_for_no_backward_is_freed_when_forward_ends():
    schedule = learnt(specs(4))
    answers(schedule, [BeforeForward(0), BeforeForward(1), AfterForward(1), AfterForward(0)])
    assert schedule.state.live[2] is Live.GATHERING
    assert schedule.on(EndForward()) == (Free(2),)
    schedule = Schedule(specs(2))
    assert answers(schedule, forward([1], differentiable=False))[-1] == Free(0)
    assert set(schedule.state.live) == {Live.SHARDED}


# What is kept after forward


def test_a_kept_root_is_gathered_once_a_step_and_one_that_reshards_again_for_backward():
    schedule = learnt(specs(3))
    assert answers(schedule, step(3)).count(Gather(0)) == 1
    schedule = Schedule(specs(3, after_forward=Keep.NOTHING))
    assert answers(schedule, forward([1, 2]))[-1] == Free(0)
    assert schedule.on(BeforeBackward(0))[:2] == (Gather(0), Await(0))


def test_reshard_after_forward_false_keeps_a_block_whole_until_its_backward_is_over():
    units = (UnitSpec(10, Keep.FOR_BACKWARD), UnitSpec(10, Keep.ALWAYS))
    schedule = Schedule(units)
    assert Free(1) not in answers(schedule, forward([1]))
    assert schedule.on(BeforeBackward(0)) == ()
    assert schedule.on(BeforeBackward(1)) == ()
    assert answers(schedule, [GradientsReady(1), AfterBackward(1)]) == [Reduce(1), Free(1)]
    evaluations = answers(Schedule(units), forward([1], differentiable=False) * 3)
    assert evaluations.count(Gather(1)) == 1


def test_an_integer_keeps_a_part_gathers_again_from_it_and_frees_it_by_the_end_of_backward():
    units = (UnitSpec(10, Keep.FOR_BACKWARD), UnitSpec(10, Keep.PART))
    schedule = Schedule(units, Limits(backward_depth=0))
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0))
    assert answers(schedule, [BeforeForward(1), AfterForward(1)]) == [Gather(1), Await(1), Shrink(1)]
    assert answers(schedule, [AfterForward(0), EndForward(), BeforeBackward(0)]) == []
    assert schedule.on(BeforeBackward(1)) == (Gather(1), Await(1))
    assert schedule.on(AfterBackward(1)) == (Free(1),)
    schedule = Schedule(units, Limits(backward_depth=0))
    answers(schedule, forward([1]))
    assert Free(1) in answers(schedule, [BeforeBackward(0), GradientsReady(0), EndBackward()])
    assert set(schedule.state.live) == {Live.SHARDED}


def test_reshard_after_backward_false_spares_the_next_forward_its_gathers():
    units = tuple(UnitSpec(10, Keep.ALWAYS, reshard_after_backward=False) for _ in range(3))
    schedule = Schedule(units)
    answers(schedule, step(3))
    assert schedule.state.live == (Live.UNSHARDED,) * 3
    assert not any(isinstance(action, (Gather, Free)) for action in answers(schedule, step(3)))


def test_a_unit_that_needs_no_parameters_in_backward_is_neither_gathered_nor_prefetched_there():
    units = (UnitSpec(10, Keep.FOR_BACKWARD), UnitSpec(10, unshard_in_backward=False), UnitSpec(10))
    schedule = learnt(units)
    answers(schedule, forward([1, 2]))
    actions = answers(schedule, backward([2, 1]))
    assert Gather(1) not in actions
    assert Reduce(1) in actions
