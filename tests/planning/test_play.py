"""A step is played as the schedule runs it, with times and bytes that can be added up by hand; stages of a pipeline in
the order of 1F1B."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise, product
from unittest import mock

import pytest

from sherd.policy import CPUOffloadPolicy, Disk, OffloadPolicy
from sherd.schedule.forecast import forecast
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Limits
from sherd.tools.simulate import play as player
from sherd.tools.simulate.play import Stage, begins
from sherd.tools.simulate.segments import moments_of, parts_of
from sherd.tools.simulate.sharded import Optimizer
from sherd.tools.simulate.timeline import Lane
from sherd.tools.simulate.work import Allocate, RankGroup, Release, TensorKind
from tests.planning.played import most
from tests.planning.stacks import KEPT, SHARD, RoundCosts, sharded_stack, stack


def play(work, sharded, costs, **options):
    return player.play(parts_of(work, sharded, costs.op), sharded, costs, **options)


def played(num_blocks=4, depth=1, offload=OffloadPolicy(), costs=None, micro_batches=1, reduces_each=True, **seconds):
    """A step of the stack, of which collectives take so many seconds."""
    sharded = sharded_stack(num_blocks, Limits(forward_depth=depth, backward_depth=depth), offload=offload)
    costs = costs or RoundCosts(**{"gather": 0, "reduce": 0} | seconds)
    return play(stack(num_blocks), sharded, costs, micro_batches=micro_batches, reduces_each=reduces_each)


def spans(timeline, lane, name):
    return [(span.unit, span.start, span.end) for span in timeline.spans if span.lane is lane and span.name == name]


def waited(timeline):
    return sum(end - start for _, start, end in spans(timeline, Lane.COMPUTE, "wait"))


def test_without_communication_a_step_takes_what_it_computes():
    timeline = played()
    assert timeline.seconds == 4 * (1 + 2) + 1
    assert waited(timeline) == 0
    assert [unit for unit, _, _ in spans(timeline, Lane.COMPUTE, "forward")] == [1, 2, 3, 4]
    assert [unit for unit, _, _ in spans(timeline, Lane.COMPUTE, "backward")] == [4, 3, 2, 1]


def test_gathers_hide_behind_the_compute_of_the_unit_before():
    timeline = played(gather=1)
    gathered = spans(timeline, Lane.GATHER, "gather")
    # The first all-gather is waited for, the others run beside the unit before; so does backward's, but for the first.
    assert gathered[:4] == [(1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4)]
    assert spans(timeline, Lane.COMPUTE, "forward") == [(1, 1, 2), (2, 2, 3), (3, 3, 4), (4, 4, 5)]
    assert timeline.seconds == 4 * 3 + 1 + waited(timeline)
    assert waited(timeline) == 2
    assert waited(played(gather=1, depth=0)) == 8, "without prefetch each is waited for"
    # In forward each of four gathers takes 3, of which a compute of 1 hides 1; in backward a compute of 2 hides 2.
    assert played(gather=3).seconds - played().seconds == 3 + 3 * (3 - 1) + 3 + 3 * (3 - 2)


def test_compute_is_slower_while_a_collective_runs_beside_it():
    alone, beside = (played(2, reduce=2, beside=each) for each in (1.0, 0.5))
    backward = [spans(each, Lane.COMPUTE, "backward") for each in (alone, beside)]
    # Backward of the first block takes 2, and the reduction of the second one's gradients takes 2 too: of these at half
    # speed 1 is computed, and 1 is left.
    assert [end - start for _, start, end in backward[0]] == [2, 2]
    assert [end - start for _, start, end in backward[1]] == [2, 3]
    assert beside.seconds == alone.seconds + 1
    for overlaps in (True, False):
        fast, slow = (played(1, 0, gather=1, reduce=1, overlaps=overlaps, beside=each) for each in (1.0, 0.5))
        assert slow.seconds == fast.seconds, "nothing runs beside it"


def test_reductions_run_beside_backward_once_or_after_each_micro_batch():
    timeline = played(reduce=2)
    assert waited(timeline) == 2
    assert [unit for unit, _, _ in spans(timeline, Lane.REDUCE, "reduce")] == [4, 3, 2, 1]
    for reduces_each, times in ((True, 3), (False, 1)):
        timeline = played(2, reduce=1, micro_batches=3, reduces_each=reduces_each)
        assert len(spans(timeline, Lane.REDUCE, "reduce")) == 2 * times


def test_without_streams_ranks_wait_for_the_slowest_by_what_each_has_computed_since_they_met():
    costs = RoundCosts(gather=1, reduce=2, overlaps=False)
    even = played(costs=costs)
    assert even.seconds == 4 * 3 + 1 + 8 * 1 + 4 * 2, "every collective is waited for"
    with mock.patch.object(costs, "waited", lambda computed: 10 * computed):
        uneven = played(costs=costs)
    # Of what is computed only the optimizer's second is behind the last collective. Nothing is before the first one.
    assert uneven.seconds == even.seconds + 10 * 4 * 3
    gathers = [end - start for _, start, end in spans(uneven, Lane.GATHER, "gather")]
    assert gathers == [1, 11, 11, 11, 11, 1, 1, 1]  # in backward a reduction is just before
    assert [end - start for _, start, end in spans(uneven, Lane.REDUCE, "reduce")] == [22] * 4
    costs.overlaps = True
    with_streams = played(costs=costs)
    with mock.patch.object(costs, "waited", lambda computed: 10 * computed):
        assert played(costs=costs) == with_streams, "with streams nobody waits for the slowest besides"


def test_without_streams_collectives_of_a_units_groups_between_the_same_ranks_are_one():
    sharded = sharded_stack(2)
    others = RankGroup(4)

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


def test_a_slow_host_leaves_the_device_waiting():
    fast, slow = (played(host=host) for host in (0.0, 5.0))
    assert slow.seconds >= 5 * len(slow.spans) > fast.seconds


def test_offloaded_shards_travel_before_they_are_gathered():
    timeline = played(2, offload=CPUOffloadPolicy(), gather=1, reduce=1, copy=2)
    copies = spans(timeline, Lane.COPY, "copy")
    assert copies[0] == (1, 0, 2)
    assert spans(timeline, Lane.GATHER, "gather")[0] == (1, 2, 3)
    first, second = spans(timeline, Lane.HOST, "optimizer")
    assert first[1] == spans(timeline, Lane.BACK, "copy")[-1][2]
    assert timeline.seconds == second[2] == first[2] + 1
    assert len(copies) == 4, "for forward and for backward"


def test_copies_of_shards_that_the_host_steps_are_fetched_once_in_a_step():
    timeline = played(2, offload=OffloadPolicy(gradients="host"), gather=1, copy=2, micro_batches=3)
    assert [unit for unit, _, _ in spans(timeline, Lane.COPY, "copy")] == [1, 2]
    assert len(spans(timeline, Lane.BACK, "copy")) == 2 * 3


def test_state_comes_and_goes_while_other_chunks_are_stepped():
    timeline = played(6, offload=OffloadPolicy(optimizer="host"), copy=1)
    come, go = spans(timeline, Lane.COPY, "copy"), spans(timeline, Lane.BACK, "copy")
    stepped = spans(timeline, Lane.COMPUTE, "optimizer")
    begin = come[0][1]
    assert [start - begin for _, start, _ in come] == [0, 1, 2, 3, 4, 5]
    assert [start - begin for _, start, _ in stepped] == [1, 2, 3, 4, 5, 6]
    assert [start - begin for _, start, _ in go] == [2, 3, 4, 5, 6, 7]
    assert timeline.seconds - begin == 7, "the last copy back goes on beside the next forward"
    # Two float32 states of 100 bytes for each of three chunks.
    in_flight = [each for each in timeline.changes if each.kind == "state in flight"]
    assert max(accumulate(each.nbytes for each in in_flight)) == 3 * 2 * 100


def test_a_disk_reads_and_writes_in_turn_and_keeps_the_host_waiting():
    disk = Disk("/scratch")
    timeline = played(4, offload=OffloadPolicy(optimizer=disk), copy=1)
    assert not spans(timeline, Lane.BACK, "copy")
    copies = spans(timeline, Lane.COPY, "copy")
    assert len(copies) == 2 * 4
    assert all(later[1] >= earlier[2] for earlier, later in pairwise(copies))
    host = played(4, offload=OffloadPolicy(gradients="host", optimizer=disk), copy=5)
    assert {end - start for _, start, end in spans(host, Lane.HOST, "optimizer")} == {5}


def test_a_step_within_backward_hides_what_the_host_takes():
    def seconds(**options):
        work, sharded = stack(4), sharded_stack(4, offload=CPUOffloadPolicy())
        costs = RoundCosts(0, 0)
        return player.play(parts_of(work, sharded, costs.op), sharded, costs, **options).seconds

    assert seconds() == 4 * 3 + 4
    assert seconds(steps_in_backward=True) == 4 * 3 + 1


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_engines_buffers_are_those_of_the_forecast(num_blocks, depth):
    work, sharded = stack(num_blocks), sharded_stack(num_blocks, Limits(forward_depth=depth, backward_depth=depth))
    step = [moment for _, moments in moments_of(work, sharded) for moment in moments]
    expected = forecast(sharded.specs, sharded.limits, [unit.groups for unit in sharded.units], step, batch_bytes=0)
    # Without activations and states, which the forecast does not know.
    bare = replace(work, events=tuple(event for event in work.events if not isinstance(event, (Allocate, Release))))
    peak = play(bare, replace(sharded, optimizer=Optimizer(states=0, accesses=3)), RoundCosts(1, 1)).peak
    assert peak.nbytes == expected.peak
    assert sum(peak.by_kind.values()) == sum(peak.by_unit.values()) == peak.nbytes
    by_kind = Counter()
    for (_, kind), nbytes in expected.parts.items():
        by_kind[kind.value] += nbytes
    assert peak.by_kind == by_kind


def test_activations_and_states_count_and_what_comes_goes_again():
    timeline = played(3, gather=1, reduce=1)
    assert timeline == played(3, gather=1, reduce=1), "the same step is played the same way"
    held = Counter()
    for change in timeline.changes:
        held[change.kind] += change.nbytes
    assert most(timeline)["activations"] == 3 * KEPT
    assert {kind: nbytes for kind, nbytes in held.items() if nbytes} == {
        MemoryKind.SHARDS.value: 3 * SHARD,
        MemoryKind.GRADIENTS.value: 3 * SHARD,
        MemoryKind.OPTIMIZER.value: 6 * SHARD,
    }
    assert max(accumulate(change.nbytes for change in timeline.changes)) == timeline.peak.nbytes
    times = [change.time for change in timeline.changes]
    assert times == sorted(times)


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
    held = [change.nbytes for change in timeline.changes if change.kind in ("activations", "temporaries")]
    assert max(accumulate(held)) == 2 * KEPT + 110


def test_a_wait_for_a_sum_over_replicas_is_one_for_an_all_reduce():
    sharded, costs = sharded_stack(2), RoundCosts(gather=1, reduce=1)
    waits = []
    for all_reduced in (0, SHARD):
        traffic = [tuple(replace(each, all_reduced=all_reduced) for each in unit.traffic) for unit in sharded.units]
        units = tuple(replace(unit, traffic=each) for unit, each in zip(sharded.units, traffic, strict=True))
        model = replace(sharded, units=units)
        waits.append({*play(stack(2), model, costs).exposed})
    assert [each - {"all-gather"} for each in waits] == [{"reduce-scatter"}, {"all-reduce"}]


# Stages of a pipeline

F, B = True, False


def test_a_stage_runs_ahead_by_those_behind_it_and_what_is_sent_and_a_slow_stage_hold_the_others_up():
    assert Stage(3, 4).order(3) == [F, B, F, B, F, B]
    assert Stage(2, 4).order(3) == [F, F, B, F, B, B]
    assert Stage(0, 4).order(5) == [F, F, F, F, B, F, B, B, B, B]
    assert Stage(0, 4).order(2) == [F, F, B, B]
    # Narayanan et al. 2021: a step takes (micro_batches + stages - 1) forwards and backwards.
    for num_stages, micro_batches in product((1, 2, 4, 7), (1, 4, 9)):
        times = begins([(1.0, 2.0)] * num_stages, micro_batches, send=0.0)
        assert times[0][-1] + 2.0 == 3.0 * (micro_batches + num_stages - 1)
    assert begins([(1.0, 2.0)] * 2, 1, send=0.5) == [(0.0, 5.0), (1.5, 2.5)]
    slow = begins([(1.0, 2.0), (3.0, 4.0)], 3, send=0.0)
    assert slow[1] == (1.0, 4.0, 8.0, 11.0, 15.0, 18.0)
    assert slow[0][-1] == 22.0


def stage_of(number, micro_batches, begin=None, keeps_buffers=True):
    """A step of one of two stages."""
    stage = Stage(number, 2, sent=10, pair=RankGroup(2, 8), keeps_buffers=keeps_buffers, begins=begin)
    return play(stack(2), sharded_stack(2), RoundCosts(0, 0), micro_batches=micro_batches, stage=stage)


def test_a_stage_holds_the_activations_of_the_micro_batches_that_are_under_way():
    one, first, last = most(stage_of(0, 1)), most(stage_of(0, 3)), most(stage_of(1, 3))
    assert one["activations"] == 2 * KEPT + 10  # and its output, until its gradient comes
    assert first["activations"] == 2 * one["activations"]  # two are under way on the first of two stages, never three
    assert last["activations"] == 2 * KEPT
    assert first["inputs"] == 3 * 10  # there is memory for the gradient of each output


def test_a_stage_that_keeps_no_buffers_has_one_gradient_at_a_time_and_no_outputs():
    first, last = (most(stage_of(number, 3, keeps_buffers=False)) for number in (0, 1))
    assert (first["activations"], first["inputs"]) == (2 * 2 * KEPT, 10)
    assert last == most(stage_of(1, 3))


def test_a_stage_waits_gathers_once_and_reduces_once():
    durations = [(2.0, 4.0)] * 2
    (begin, _) = begins(durations, 3, send=0.0)
    timeline = stage_of(0, 3, begin)
    gathers = [span.unit for span in timeline.spans if span.lane is Lane.GATHER]
    reduces = [span.unit for span in timeline.spans if span.lane is Lane.REDUCE]
    assert (gathers, reduces) == ([], [])  # in no time
    sends = [span for span in timeline.spans if span.name == "send"]
    assert len(sends) == 3  # the first stage sends outputs, and no gradients
    assert timeline.seconds == 6.0 * 4 + 1.0  # and the optimizer's second
    assert timeline.exposed["model parallel"] == 6.0
