"""Ranks that are about to start different collectives all learn so at debug level DETAIL, before bytes are mixed."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import MixedPrecision, ShardingStrategy
from sherd._torch import named_group
from sherd.errors import CommError
from sherd.guard import checker
from sherd.guard.order_check import PlannedCollective, Tree
from tests.support.models import Wired
from tests.support.ranks import RanksFailed
from tests.support.sharding import sharded
from tests.support.training import made


@contextlib.contextmanager
def detail(level=dist.DebugLevel.DETAIL):
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def branching(out=4, bias=True, frozen=False):
    """Its caller says which of its blocks runs."""
    first, last = nn.Linear(4, 4), nn.Linear(4, out, bias=bias).requires_grad_(not frozen)
    return Wired(lambda self, x, block: getattr(self, block)(x), first=first, last=last)


def wrapped(model, **options):
    return sharded(model, "flat wrapper", **options)


FRONT_ENDS = ("flat wrapper", "wrapper", "shard")
BLOCKS = ("first", "last")


def step(model, block):
    model(torch.ones(2, 4), block).sum().backward()


def error_of(run):
    """What the error that `run` raises says, without this rank's number in front."""
    with pytest.raises(CommError) as raised:
        run()
    return raised.value.args[0]


def told(world, make_ranks_differ, *args):
    """What both of two ranks are told."""
    said = world(2).run(make_ranks_differ, *args)
    assert said[0] == said[1]
    return said[0]


# Ranks that differ


def branch_on_the_rank(front_end, steps_before):
    rank = dist.get_rank()
    with detail():
        model = sharded(made(branching), front_end)
        for _ in range(steps_before):
            step(model, "first")
        return error_of(lambda: step(model, BLOCKS[rank]))


@pytest.mark.parametrize(("front_end", "steps_before"), [(each, 0) for each in FRONT_ENDS] + [("flat wrapper", 2)])
def test_a_forward_that_branches_on_the_rank_is_named_on_all_ranks(world, front_end, steps_before):
    said = told(world, branch_on_the_rank, front_end, steps_before)
    assert "rank 0 gathers unit first (first.weight 4x4 float32, first.bias 4 float32);" in said
    assert "rank 1 gathers unit last (last.weight 4x4 float32, last.bias 4 float32)." in said
    assert "same order" in said


def one_rank_does_not_reduce():
    rank = dist.get_rank()
    with detail():
        model = wrapped(made(branching))

        def two_steps():
            for _ in range(2):
                with model.no_sync() if rank == 1 else contextlib.nullcontext():
                    step(model, "last")

        return error_of(two_steps)


def test_a_reduction_that_meets_a_gather_is_named(world):
    said = told(world, one_rank_does_not_reduce)
    assert "rank 0 reduces the gradients of unit last" in said
    assert "rank 1 gathers unit" in said


DIFFERENCES = {
    "shape": (
        lambda rank: {"out": 4 + rank},
        "(last.weight 4x4 float32, last.bias 4 float32)",
        "(last.weight 5x4 float32, last.bias 5 float32)",
    ),
    "list": (lambda rank: {"bias": rank == 0}, "(last.bias 4 float32)", "(last.weight 4x4 float32)"),
    "frozen": (
        lambda rank: {"frozen": rank == 1},
        "(last.weight 4x4 float32, last",
        "(last.weight 4x4 float32 frozen, last",
    ),
}


def made_differently(what):
    options, _, _ = DIFFERENCES[what]
    with detail():
        model = wrapped(branching(**options(dist.get_rank())), use_orig_params=True)
        return error_of(lambda: step(model, "last"))


def test_units_that_were_made_differently_are_told_by_what_differs(world):
    for what, (_, first, second) in DIFFERENCES.items():
        said = told(world, made_differently, what)
        assert f"rank 0 gathers unit last {first}" in said, what
        assert f"rank 1 gathers unit last {second}" in said, what


def one_rank_evaluates():
    with detail(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        model = wrapped(made(branching), mixed_precision=MixedPrecision(torch.bfloat16)).train(dist.get_rank() == 0)
        return error_of(lambda: model(torch.ones(2, 4), "first"))


def test_full_precision_in_eval_on_one_rank_is_named(world):
    said = told(world, one_rank_evaluates)
    assert "rank 0 gathers unit first (" in said
    assert "rank 1 gathers unit first in full precision (" in said


def one_rank_stays_away():
    with detail(), pytest.MonkeyPatch.context() as patch:
        soon = named_group("one_rank_stays_away", range(2), timedelta(seconds=1))
        tree = Tree((0, 1), [soon], is_top=True, whole=lambda: soon, timeout_s=1)
        patch.setattr(checker.DivergenceChecker, "_tree", lambda _: tree)
        model = wrapped(made(branching))
        model(torch.ones(2, 4), "first")
        if dist.get_rank() == 1:
            time.sleep(2)  # in a loop that has ended earlier
        else:
            model(torch.ones(2, 4), "first")


@pytest.mark.slow
def test_a_rank_that_comes_to_no_collective_is_an_error_after_the_timeout(world):
    with pytest.raises(RanksFailed) as failed:  # so that the next test has other processes
        world(2).run(one_rank_stays_away)
    kind, said = failed.value.errors[0]
    assert kind == "CommError"
    assert "rank 0 gathers unit" in said
    assert "waits for ranks [0, 1]" in said
    assert "Ranks 1 failed to pass" in said  # torch names who it was


# Ranks that agree


def train_both(level):
    grads = []
    for front_end in FRONT_ENDS:
        with detail(level):
            model = sharded(made(branching), front_end)
            for block in (*BLOCKS, "first"):
                step(model, block)
        grads.append([each.grad.full_tensor().reshape(-1) for each in model.parameters() if each.grad is not None])
    return [torch.cat(each) for each in grads]


def test_ranks_that_agree_train_as_they_do_unchecked(world):
    checked_runs, plain_runs = (
        world(2).run(train_both, each) for each in (dist.DebugLevel.DETAIL, dist.DebugLevel.OFF)
    )
    for found, expected in zip(checked_runs, plain_runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def different_blocks_unsharded():
    with detail():
        model = wrapped(made(branching), sharding_strategy=ShardingStrategy.NO_SHARD)
        rank = dist.get_rank()
        with torch.no_grad():
            model(torch.ones(2, 4), BLOCKS[rank])  # nothing is sent
        return error_of(lambda: step(model, BLOCKS[rank]))


def test_without_shards_only_reductions_are_compared(world):
    said = told(world, different_blocks_unsharded)
    assert "rank 0 reduces the gradients of unit first" in said
    assert "rank 1 reduces the gradients of unit last" in said


def comparisons_of_a_settled_step(level):
    with detail(level), pytest.MonkeyPatch.context() as patch:
        model = sharded(made(branching))
        for _ in range(3):
            step(model, "first")
        compared = []
        patch.setattr(checker, "agree", lambda *_: compared.append(1))
        step(model, "first")
        return len(compared)


def test_below_detail_a_settled_step_compares_nothing(world):
    assert world(2).run(comparisons_of_a_settled_step, dist.DebugLevel.INFO) == [0, 0]
    first, second = world(2).run(comparisons_of_a_settled_step, dist.DebugLevel.DETAIL)
    assert first == second > 0


def test_a_long_list_of_parameters_is_cut_off_at_what_differs():
    deed = PlannedCollective("gathers unit a", tuple(f"w{index}" for index in range(20)))
    assert deed.describe(set()).endswith("w7 and 12 more)")
    assert deed.describe({*deed.parameters} - {"w19"}) == "gathers unit a (w19)"
    assert deed.digest(3) == PlannedCollective("gathers unit a", deed.parameters, line="elsewhere.py:1").digest(3)
    assert deed.digest(3) != deed.digest(4)
    assert deed.digest(3) != PlannedCollective("gathers unit b", deed.parameters).digest(3)
