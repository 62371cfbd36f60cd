"""What the schedule asks for when a step is not one forward and one backward through all units."""

from dataclasses import replace

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    Await,
    BeforeBackward,
    BeforeForward,
    Collect,
    Discard,
    EndBackward,
    EndForward,
    FinishReduce,
    Free,
    FreeGroup,
    Gather,
    GatherMore,
    GradientsReady,
    GroupPassed,
    Reduce,
    Reset,
    Reshard,
    Unshard,
)
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, Order, UnitSpec
from tests.schedule.model import StrictEngine, answers, backward, forward, specs, step

# Recomputation


def test_recomputation_gathers_the_unit_and_keeps_it_for_the_backward_that_follows():
    schedule = Schedule(specs(2), Limits(backward_depth=0))
    answers(schedule, [*forward([1]), BeforeBackward(0)])
    assert schedule.on(BeforeForward(1, recomputing=True)) == (Gather(1), Await(1))
    assert schedule.on(AfterForward(1, recomputing=True)) == ()
    assert schedule.on(BeforeBackward(1)) == ()
    assert answers(schedule, [GradientsReady(1), AfterBackward(1)]) == [Reduce(1), Free(1)]


def test_recomputation_teaches_the_order_of_backward_and_leaves_that_of_forward_alone():
    schedule = Schedule(specs(3))
    events = [*forward([1, 2]), BeforeBackward(0)]
    for unit in (2, 1):
        events += [BeforeForward(unit, True), AfterForward(unit, True), BeforeBackward(unit), AfterBackward(unit)]
    answers(schedule, [*events, EndBackward()])
    assert schedule.state.forward == Order(learnt=(0, 1, 2))
    assert schedule.state.backward == Order(learnt=(0, 2, 1))


# Groups that backward passes before the rest of their unit


def in_backward_of_the_last(units: tuple[UnitSpec, ...] = specs(2), **limits: int) -> Schedule:
    """A schedule whose last unit backward has just entered; nothing is gathered ahead in backward."""
    schedule = Schedule(units, Limits(backward_depth=0, **limits))
    last = len(units) - 1
    answers(schedule, [*forward([*range(1, last + 1)]), BeforeBackward(0), BeforeBackward(last)])
    return schedule


def test_groups_go_one_by_one_and_the_rest_with_the_unit_and_who_reads_it_again_gets_them_back():
    schedule = in_backward_of_the_last()
    assert schedule.on(GroupPassed(1, 2)) == (FreeGroup(1, 2),)
    assert schedule.on(GroupPassed(1, 0)) == (FreeGroup(1, 0),)
    assert schedule.on(BeforeBackward(1)) == (), "another output of it leads to what is still whole"
    assert answers(schedule, [GradientsReady(1), AfterBackward(1)]) == [Reduce(1), Free(1)]
    assert not schedule.state.passed
    for event in (BeforeForward(1, recomputing=True), Unshard(1)):
        schedule = in_backward_of_the_last()
        schedule.on(GroupPassed(1, 0))
        assert schedule.on(event) == (Gather(1), Await(1)), event
        assert not schedule.state.passed, event


def test_no_group_goes_alone_of_a_unit_that_stays_whole_after_backward_or_is_borrowed_from():
    stays = (*specs(1), UnitSpec(100, reshard_after_backward=False))
    borrowed_from = (*specs(2), UnitSpec(100, tied_owners=(1,)))
    for units in (stays, borrowed_from):
        schedule = in_backward_of_the_last(units)
        assert schedule.state.live[1] is Live.UNSHARDED, units
        assert schedule.on(GroupPassed(1, 0)) == (), units


def test_no_group_goes_alone_of_a_unit_that_was_called_twice_and_may_be_recomputed_once_more():
    schedule = Schedule(specs(2), Limits(backward_depth=0))
    answers(schedule, [*forward([1, 1]), BeforeBackward(0), BeforeForward(1, recomputing=True), BeforeBackward(1)])
    assert schedule.on(GroupPassed(1, 0)) == ()


def test_a_unit_that_lost_a_group_is_freed_when_backward_ends_though_it_is_to_stay_whole_by_now():
    schedule = in_backward_of_the_last()
    schedule.on(GroupPassed(1, 0))
    stays = tuple(replace(spec, reshard_after_backward=False) for spec in schedule.state.specs)
    schedule.move_to(replace(schedule.state, specs=stays))
    assert schedule.on(EndBackward()) == (Free(1),)


# Gathers in parts


def in_parts(num_parts: int, ahead: int) -> Schedule:
    """Backward has freed the last unit in `num_parts`, and enters it again; the unit before has `ahead` parts."""
    root, *blocks = (UnitSpec(100, num_parts=each) for each in (1, ahead, num_parts))
    schedule = Schedule((replace(root, after_forward=Keep.FOR_BACKWARD), *blocks))
    entering = [*forward([1, 2]), BeforeBackward(0), BeforeBackward(2)]
    passed = [GroupPassed(2, group) for group in range(num_parts - 1, 0, -1)]
    leaving = [AfterBackward(2, True), BeforeBackward(1), AfterBackward(1, True), EndBackward()]
    answers(schedule, [*entering, *passed, *leaving, *entering])
    return schedule


def test_as_groups_of_a_unit_go_those_of_the_next_are_gathered():
    for num_parts, ahead, expected in (
        (3, 3, [[FreeGroup(2, 2), GatherMore(1, 1)], [FreeGroup(2, 1), Collect(2), GatherMore(1)]]),
        (3, 2, [[FreeGroup(2, 2), GatherMore(1, 1)], [FreeGroup(2, 1), Collect(2), GatherMore(1)]]),
        (2, 4, [[FreeGroup(2, 1), Collect(2), GatherMore(1)]]),
        (3, 1, [[FreeGroup(2, 2)], [FreeGroup(2, 1), Collect(2)]]),
    ):
        schedule = in_parts(num_parts, ahead)
        found = [answers(schedule, [GroupPassed(2, group)]) for group in range(num_parts - 1, 0, -1)]
        assert found == expected, (num_parts, ahead)
        assert answers(schedule, [AfterBackward(2, True), BeforeBackward(1)]) == [Free(2), Reduce(2), Await(1)]


def test_before_any_other_collective_all_groups_are_gathered_whatever_has_passed_on_this_rank():
    for passed in ([], [GroupPassed(2, 2)]):
        others = (BeforeBackward(1), Unshard(0), Reset(), EndBackward(), BeforeForward(1, recomputing=True))
        for event in (AfterBackward(2, True), *others):
            schedule = in_parts(3, 3)
            answers(schedule, passed)
            assert schedule.on(event)[0] == GatherMore(1), (passed, event)
            assert schedule.state.partly is None


def test_a_unit_whose_groups_did_not_pass_gathers_the_next_at_once_in_the_next_backward():
    schedule = in_parts(3, 3)
    answers(schedule, [AfterBackward(2, True), BeforeBackward(1), AfterBackward(1, True), EndBackward()])
    answers(schedule, [*forward([1, 2]), BeforeBackward(0)])
    assert schedule.on(BeforeBackward(2))[-1] == Gather(1)


# More, or less, than one call of each unit


def test_a_unit_is_gathered_for_each_call_and_costs_nothing_once_its_absence_is_learnt():
    actions = answers(Schedule(specs(2)), forward([1, 1]))
    assert actions == [Gather(0), Await(0), *[Gather(1), Await(1), Free(1)] * 2]
    events = [*forward([1, 3]), *backward([3, 1])]
    assert all(action.unit != 2 for action in answers(Schedule(specs(4)), events * 2))


def test_two_forwards_before_one_backward_leave_the_root_whole_in_between():
    schedule = Schedule(specs(2))
    answers(schedule, forward([1]))
    assert schedule.on(BeforeForward(0))[:1] != (Gather(0),)
    assert schedule.state.live[0] is Live.UNSHARDED


def test_an_evaluation_gathers_and_frees_everything_reduces_nothing_and_does_not_change_the_next_step():
    schedule = Schedule(specs(3))
    answers(schedule, step(3) * 2)
    steady = answers(schedule, step(3))
    actions = answers(schedule, forward([1, 2], differentiable=False) * 2)
    assert not any(isinstance(action, (Reduce, FinishReduce)) for action in actions)
    assert set(schedule.state.live) == {Live.SHARDED}
    assert answers(schedule, step(3)) == steady


def test_an_order_that_changes_costs_prefetching_for_the_rest_of_the_pass_and_is_right_from_then_on():
    schedule = Schedule(specs(4))
    answers(schedule, step(4))
    first = answers(schedule, [*forward([3, 2, 1]), *backward([1, 2, 3])])
    # Unit 1 was expected and not used at once; it is simply waited for later.
    assert first[:4] == [Gather(0), Await(0), Gather(1), Gather(3)]
    assert schedule.state.forward.learnt == (0, 3, 2, 1)
    assert schedule.on(BeforeForward(0)) == (Gather(0), Await(0), Gather(3))
    schedule = Schedule(specs(5), Limits(forward_depth=2))
    answers(schedule, [*step(5), BeforeForward(0), BeforeForward(4)])
    assert schedule.state.forward.upcoming() == ()
    assert schedule.on(BeforeForward(3)) == (Gather(3), Await(3))


# Gradients


def test_accumulation_reduces_on_the_pass_that_syncs_alone_and_keeps_what_the_earlier_one_taught():
    syncing = specs(3)
    schedule = Schedule(tuple(replace(spec, reduces=False) for spec in syncing))
    waiting = answers(schedule, step(3))
    assert not any(isinstance(action, (Reduce, FinishReduce)) for action in waiting)
    assert set(schedule.state.live) == {Live.SHARDED}
    schedule.move_to(replace(schedule.state, specs=syncing))
    actions = answers(schedule, step(3))
    assert [action.unit for action in actions if isinstance(action, Reduce)] == [2, 1, 0]
    assert actions[:3] == [Gather(0), Await(0), Gather(1)]


def test_no_more_reductions_are_in_flight_than_there_are_buffers_and_the_oldest_is_settled_first():
    for buffers in (1, 2, 3):
        engine = StrictEngine(specs(6), Limits(reduce_buffers=buffers))
        engine.run(step(6))
        assert engine.reduced == [5, 4, 3, 2, 1, 0], buffers
        actions = answers(Schedule(specs(6), Limits(reduce_buffers=buffers)), step(6))
        first = actions.index(FinishReduce(5))
        assert sum(isinstance(action, Reduce) for action in actions[:first]) == buffers
    none = in_backward_of_the_last(reduce_buffers=0)
    assert none.on(GradientsReady(1)) == (Reduce(1), FinishReduce(1))
    assert none.state.reducing == ()


def test_a_unit_is_freed_before_its_reduction_starts_so_that_the_two_never_add_up():
    """Gradients that came without all the others are reduced when backward has passed the unit."""
    assert in_backward_of_the_last().on(AfterBackward(1, unreduced=True)) == (Free(1), Reduce(1))


def test_a_unit_whose_gradients_come_twice_in_one_backward_settles_the_first_reduction_before_the_second():
    schedule = in_backward_of_the_last(reduce_buffers=4)
    schedule.on(GradientsReady(1))
    assert schedule.on(GradientsReady(1)) == (FinishReduce(1), Reduce(1))


def test_after_a_backward_that_is_not_the_last_parameters_are_freed_and_reductions_stay_in_flight():
    schedule = Schedule(specs(2))
    actions = answers(schedule, [*forward([1]), *backward([1], last=False)])
    assert actions[-1] == Free(0)
    assert set(schedule.state.live) == {Live.SHARDED}
    assert schedule.state.reducing == (0,)
    later = answers(schedule, [*forward([1]), *backward([1])])
    assert later.count(FinishReduce(0)) == 2
    assert schedule.state.reducing == ()


# Tied weights


def test_a_borrower_brings_its_companion_and_one_around_its_owner_keeps_it_until_its_own_backward_is_over():
    units = (UnitSpec(10, Keep.FOR_BACKWARD), UnitSpec(10), UnitSpec(10, tied_owners=(1,)))
    schedule = Schedule(units)
    schedule.on(BeforeForward(0))
    assert schedule.on(BeforeForward(2)) == (Gather(2), Gather(1), Await(2), Await(1))
    units = (UnitSpec(10, Keep.FOR_BACKWARD, tied_owners=(1,)), UnitSpec(10))
    StrictEngine(units).run(step(2))


def test_a_tied_parameters_owner_stays_whole_from_its_own_forward_to_the_borrowers():
    units = (UnitSpec(10, Keep.FOR_BACKWARD), UnitSpec(10), UnitSpec(10), UnitSpec(10, tied_owners=(1,)))
    schedule = Schedule(units)
    actions = answers(schedule, forward([1, 2, 3]))
    assert actions.count(Gather(1)) == 1
    assert actions[-1] == Free(1)


# Moves of the user's own, and values that grow old


def test_unshard_by_hand_waits_or_only_starts_as_asked_and_reshard_gives_it_back():
    schedule = Schedule(specs(2))
    assert schedule.on(Unshard(1, wait=False)) == (Gather(1),)
    assert schedule.on(Unshard(1)) == (Await(1),)
    assert schedule.on(Unshard(1)) == ()
    assert schedule.on(Reshard(1)) == (Free(1),)
    assert schedule.on(Reshard(1)) == ()
    answers(schedule, [Unshard(1, wait=False), BeforeForward(0)])
    assert schedule.on(BeforeForward(1)) == (Await(1),), "a forward gathers it again"


# When things go wrong


def test_reset_in_the_middle_of_a_pass_frees_forgets_and_stands_where_a_step_begins():
    schedule = Schedule(specs(3))
    answers(schedule, step(3) * 2)
    rest, steady = schedule.state, answers(schedule, step(3))
    answers(schedule, [*forward([1, 2]), BeforeBackward(0), BeforeBackward(2), GradientsReady(2), AfterBackward(2)])
    assert schedule.on(Reset()) == (Free(0), Discard(0), Free(1), Discard(1), Discard(2))
    assert schedule.state == rest
    answers(schedule, [BeforeForward(0), BeforeForward(1), Reset()])
    assert answers(schedule, step(3)) == steady


def test_reset_that_keeps_gradients_leaves_reductions_in_flight():
    schedule = Schedule(specs(2))
    answers(schedule, [*forward([1]), *backward([1], last=False), BeforeForward(0)])
    assert schedule.on(Reset(gradients=False)) == (Free(0), Free(1))
    assert schedule.state.reducing == (0,)


def test_a_forward_that_raised_in_a_block_leaves_nothing_whole_but_what_is_kept():
    schedule = Schedule(specs(3))
    answers(schedule, [BeforeForward(0), BeforeForward(1), AfterForward(1), AfterForward(0), EndForward(False)])
    assert set(schedule.state.live) == {Live.SHARDED}
