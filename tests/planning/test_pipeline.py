"""Do stages of a pipeline compute in the order of 1F1B, and wait for one another?"""

from itertools import accumulate

import pytest

from sherd.simulate.pipeline import Stage, begins
from sherd.simulate.play import play
from sherd.simulate.stretches import parts_of
from sherd.simulate.timeline import Lane
from sherd.simulate.work import Group
from tests.planning.stacks import KEPT, RoundCosts, sharded_stack, stack

F, B = True, False


def test_a_stage_runs_ahead_by_as_many_forwards_as_there_are_stages_behind_it():
    assert Stage(3, 4).order(3) == [F, B, F, B, F, B]
    assert Stage(2, 4).order(3) == [F, F, B, F, B, B]
    assert Stage(0, 4).order(5) == [F, F, F, F, B, F, B, B, B, B]
    assert Stage(0, 4).order(2) == [F, F, B, B]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_equal_stages_need_as_many_rounds_as_micro_batches_and_stages_less_one(num_stages, micro_batches):
    # Narayanan et al. 2021: a step takes (micro_batches + stages - 1) forwards and backwards.
    times = begins([(1.0, 2.0)] * num_stages, micro_batches, send=0.0)
    assert times[0][-1] + 2.0 == 3.0 * (micro_batches + num_stages - 1)


def test_what_is_sent_and_a_slow_stage_hold_the_others_up():
    assert begins([(1.0, 2.0)] * 2, 1, send=0.5) == [(0.0, 5.0), (1.5, 2.5)]
    slow = begins([(1.0, 2.0), (3.0, 4.0)], 3, send=0.0)
    assert slow[1] == (1.0, 4.0, 8.0, 11.0, 15.0, 18.0)
    assert slow[0][-1] == 22.0


def played(number, micro_batches, begin=None, blocks=2):
    work, sharded = stack(blocks), sharded_stack(blocks)
    costs = RoundCosts(gather=0.0, reduce=0.0)
    stage = Stage(number, 2, sent=10, pair=Group(2, 8), begins=begin)
    return play(parts_of(work, sharded, costs.op), sharded, costs, micro_batches=micro_batches, stage=stage)


def most(timeline, kind):
    changes = [change.nbytes for change in timeline.changes if change.kind == kind]
    return max(accumulate(changes))


def test_a_stage_holds_the_activations_of_the_micro_batches_that_are_under_way():
    of_one = 2 * KEPT + 10  # and its output, until its gradient comes
    assert most(played(0, 1), "activations") == of_one
    assert most(played(0, 3), "activations") == 2 * of_one  # two are under way on the first of two stages, never three
    assert most(played(1, 3), "activations") == 2 * KEPT
    assert most(played(0, 3), "inputs") == 3 * 10  # there is memory for the gradient of each output


def test_a_stage_waits_gathers_once_and_reduces_once():
    durations = [(2.0, 4.0)] * 2
    (begin, _) = begins(durations, 3, send=0.0)
    timeline = played(0, 3, begin)
    gathers = [span.unit for span in timeline.spans if span.lane is Lane.GATHER]
    reduces = [span.unit for span in timeline.spans if span.lane is Lane.REDUCE]
    assert (gathers, reduces) == ([], [])  # in no time
    sends = [span for span in timeline.spans if span.name == "send"]
    assert len(sends) == 3  # the first stage sends outputs, and no gradients
    assert timeline.seconds == 6.0 * 4 + 1.0  # and the optimizer's second
    assert timeline.exposed["model parallel"] == 6.0
