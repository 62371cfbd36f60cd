"""Is a step played as the schedule runs it, with times and bytes that can be added up by hand?"""

from dataclasses import replace
from unittest import mock

import pytest

from sherd.schedule.forecast import forecast
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Limits
from sherd.simulate import play as player
from sherd.simulate.moments import moments_of
from sherd.simulate.sharded import Optimizer
from sherd.simulate.stretches import parts_of
from sherd.simulate.timeline import Lane
from sherd.simulate.work import Allocate, Group, Release, TensorKind
from tests.planning.stacks import KEPT, SHARD, RoundCosts, sharded_stack, stack


def play(work, sharded, costs, **options):
    return player.play(parts_of(work, sharded, costs.op), sharded, costs, **options)


def spans(timeline, lane, name):
    return [(span.unit, span.start, span.end) for span in timeline.spans if span.lane is lane and span.name == name]


def waited(timeline):
    return sum(end - start for _, start, end in spans(timeline, Lane.COMPUTE, "wait"))


def test_without_communication_a_step_takes_what_it_computes():
    timeline = play(stack(4), sharded_stack(4), RoundCosts(0, 0))
    assert timeline.seconds == 4 * (1 + 2) + 1
    assert waited(timeline) == 0
    assert [unit for unit, _, _ in spans(timeline, Lane.COMPUTE, "forward")] == [1, 2, 3, 4]
    assert [unit for unit, _, _ in spans(timeline, Lane.COMPUTE, "backward")] == [4, 3, 2, 1]


def test_gathers_hide_behind_the_compute_of_the_unit_before():
    timeline = play(stack(4), sharded_stack(4), RoundCosts(gather=1, reduce=0))
    gathered = spans(timeline, Lane.GATHER, "gather")
    # The first all-gather is waited for, the others run beside the unit before; so does backward's, but for the first.
    assert gathered[:4] == [(1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4)]
    assert spans(timeline, Lane.COMPUTE, "forward") == [(1, 1, 2), (2, 2, 3), (3, 3, 4), (4, 4, 5)]
    assert timeline.seconds == 4 * 3 + 1 + waited(timeline)
    assert waited(timeline) == 2


def test_slow_gathers_are_exposed_by_what_compute_does_not_hide():
    fast, slow = (play(stack(4), sharded_stack(4), RoundCosts(gather, 0)).seconds for gather in (0, 3))
    # In forward each of four gathers takes 3, of which a compute of 1 hides 1; in backward a compute of 2 hides 2.
    assert slow - fast == 3 + 3 * (3 - 1) + 3 + 3 * (3 - 2)


def test_compute_is_slower_while_a_collective_runs_beside_it():
    alone, beside = (play(stack(2), sharded_stack(2), RoundCosts(0, reduce=2, beside=each)) for each in (1.0, 0.5))
    backward = [spans(each, Lane.COMPUTE, "backward") for each in (alone, beside)]
    # Backward of the first block takes 2, and the reduction of the second one's gradients takes 2 too: of these at half
    # speed 1 is computed, and 1 is left.
    assert [end - start for _, start, end in backward[0]] == [2, 2]
    assert [end - start for _, start, end in backward[1]] == [2, 3]
    assert beside.seconds == alone.seconds + 1


@pytest.mark.parametrize("overlaps", [True, False])
def test_compute_is_not_slowed_where_nothing_runs_beside_it(overlaps):
    costs = [RoundCosts(1, 1, overlaps=overlaps, beside=each) for each in (1.0, 0.5)]
    limits = Limits(forward_depth=0, backward_depth=0)
    fast, slow = (play(stack(1), sharded_stack(1, limits), each) for each in costs)
    assert slow.seconds == fast.seconds


def test_without_prefetch_each_gather_is_waited_for():
    limits = Limits(forward_depth=0, backward_depth=0)
    timeline = play(stack(4), sharded_stack(4, limits), RoundCosts(gather=1, reduce=0))
    assert waited(timeline) == 8


def test_reductions_run_beside_backward_and_only_the_last_is_waited_for():
    timeline = play(stack(4), sharded_stack(4), RoundCosts(gather=0, reduce=2))
    assert waited(timeline) == 2
    assert [unit for unit, _, _ in spans(timeline, Lane.REDUCE, "reduce")] == [4, 3, 2, 1]


def test_a_device_without_streams_waits_for_every_collective():
    timeline = play(stack(4), sharded_stack(4), RoundCosts(gather=1, reduce=2, overlaps=False))
    assert timeline.seconds == 4 * 3 + 1 + 8 * 1 + 4 * 2


def test_without_streams_ranks_wait_for_the_slowest_by_what_each_has_computed_since_they_met():
    costs = RoundCosts(gather=1, reduce=2, overlaps=False)
    even = play(stack(4), sharded_stack(4), costs)
    with mock.patch.object(costs, "waited", lambda computed: 10 * computed):
        uneven = play(stack(4), sharded_stack(4), costs)
    # Of what is computed only the optimizer's second is behind the last collective. Nothing is before the first one.
    assert uneven.seconds == even.seconds + 10 * 4 * 3
    gathers = [end - start for _, start, end in spans(uneven, Lane.GATHER, "gather")]
    assert gathers == [1, 11, 11, 11, 11, 1, 1, 1]  # in backward a reduction is just before
    assert [end - start for _, start, end in spans(uneven, Lane.REDUCE, "reduce")] == [22] * 4


def test_without_streams_collectives_of_a_units_groups_between_the_same_ranks_are_one():
    sharded = sharded_stack(2)
    others = Group(4)

    def with_groups(unit, *shards):
        traffic = tuple(replace(unit.traffic[0], shard=shard) for shard in shards)
        return replace(unit, groups=unit.groups * len(shards), traffic=traffic)

    def taken(*shards):
        root, *blocks = sharded.units
        units = (root, *(with_groups(each, *shards) for each in blocks))
        timeline = play(stack(2), replace(sharded, units=units), RoundCosts(gather=1, reduce=2, overlaps=False))
        return timeline.seconds, [span.nbytes for span in timeline.spans if span.lane is Lane.GATHER]

    seconds, sent = taken(SHARD)
    assert taken(SHARD, SHARD) == (seconds, [2 * each for each in sent])
    longer, apart = taken(SHARD, others)
    assert (longer, len(apart)) == (seconds + 4 * 1 + 2 * 2, 2 * len(sent))


def test_with_streams_nobody_waits_for_the_slowest_besides():
    costs = RoundCosts(gather=1, reduce=2)
    even = play(stack(2), sharded_stack(2), costs)
    with mock.patch.object(costs, "waited", lambda computed: 10 * computed):
        assert play(stack(2), sharded_stack(2), costs) == even


def test_a_slow_host_leaves_the_device_waiting():
    fast, slow = (play(stack(4), sharded_stack(4), RoundCosts(0, 0, host=host)) for host in (0.0, 5.0))
    num_queued = len(slow.spans)
    assert slow.seconds >= 5 * num_queued > fast.seconds


def test_gradients_of_several_micro_batches_are_reduced_once_or_each_time():
    for reduces_each, times in ((True, 3), (False, 1)):
        timeline = play(stack(2), sharded_stack(2), RoundCosts(0, 1), micro_batches=3, reduces_each=reduces_each)
        assert len(spans(timeline, Lane.REDUCE, "reduce")) == 2 * times


def test_offloaded_shards_travel_before_they_are_gathered():
    timeline = play(stack(2), sharded_stack(2, is_offloaded=True), RoundCosts(gather=1, reduce=1, copy=2))
    copies = spans(timeline, Lane.COPY, "copy")
    assert copies[0] == (1, 0, 2)
    assert spans(timeline, Lane.GATHER, "gather")[0] == (1, 2, 3)
    (optimizer,) = spans(timeline, Lane.COMPUTE, "optimizer")
    assert optimizer[1] == copies[-1][2]


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_engines_buffers_are_those_of_the_forecast(num_blocks, depth):
    work, sharded = stack(num_blocks), sharded_stack(num_blocks, Limits(forward_depth=depth, backward_depth=depth))
    step = [moment for _, moments in moments_of(work, sharded) for moment in moments]
    expected = forecast(sharded.specs, sharded.limits, [unit.groups for unit in sharded.units], step, batch_bytes=0)
    # Without activations and states, which the forecast does not know.
    bare = replace(work, events=tuple(event for event in work.events if type(event).__name__ not in NOT_ENGINES))
    peak = play(bare, replace(sharded, optimizer=Optimizer(states=0, accesses=3)), RoundCosts(1, 1)).peak
    assert peak.nbytes == expected.peak
    assert sum(peak.by_kind.values()) == sum(peak.by_unit.values()) == peak.nbytes
    by_kind = {}
    for (_, kind), nbytes in expected.parts.items():
        by_kind[kind.value] = by_kind.get(kind.value, 0) + nbytes
    assert peak.by_kind == by_kind


NOT_ENGINES = {"Allocate", "Release"}


def test_activations_and_states_count_and_what_comes_goes_again():
    timeline = play(stack(3), sharded_stack(3), RoundCosts(1, 1))
    held, most = {}, {}
    for change in timeline.changes:
        held[change.kind] = held.get(change.kind, 0) + change.nbytes
        most[change.kind] = max(most.get(change.kind, 0), held[change.kind])
    assert most["activations"] == 3 * KEPT
    assert held == dict.fromkeys(held, 0) | {
        MemoryKind.SHARDS.value: 3 * SHARD,
        MemoryKind.GRADIENTS.value: 3 * SHARD,
        MemoryKind.OPTIMIZER.value: 6 * SHARD,
    }
    total = peak = 0
    for change in timeline.changes:
        total += change.nbytes
        peak = max(peak, total)
    assert peak == timeline.peak.nbytes
    assert all(a.time <= b.time for a, b in zip(timeline.changes, timeline.changes[1:], strict=False))


def test_what_is_released_before_something_comes_is_never_there_beside_it():
    work, events = stack(3), []
    for event in work.events:
        if isinstance(event, Release):  # a temporary comes and goes; the activation goes; a larger temporary comes
            small = Allocate(100 + event.tensor, 10, TensorKind.TEMPORARY)
            large = Allocate(200 + event.tensor, 110, TensorKind.TEMPORARY)
            events += [small, Release(small.tensor), event, large, Release(large.tensor)]
        else:
            events.append(event)
    timeline = play(replace(work, events=tuple(events)), sharded_stack(3), RoundCosts(1, 1))
    held = most = 0
    for change in timeline.changes:
        held += change.nbytes if change.kind in ("activations", "temporaries") else 0
        most = max(most, held)
    assert most == 2 * KEPT + 110


def test_the_same_step_is_played_the_same_way():
    first, second = (play(stack(3), sharded_stack(3), RoundCosts(1, 1), title="a") for _ in range(2))
    assert first == second


def test_a_wait_for_a_sum_over_replicas_is_one_for_an_all_reduce():
    sharded, costs = sharded_stack(2), RoundCosts(gather=1, reduce=1)
    waits = []
    for all_reduced in (0, SHARD):
        traffic = [tuple(replace(each, all_reduced=all_reduced) for each in unit.traffic) for unit in sharded.units]
        units = tuple(replace(unit, traffic=each) for unit, each in zip(sharded.units, traffic, strict=True))
        model = replace(sharded, units=units)
        waits.append({*play(stack(2), model, costs).exposed})
    assert [each - {"all-gather"} for each in waits] == [{"reduce-scatter"}, {"all-reduce"}]
