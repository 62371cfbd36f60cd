"""Does the memory report know what each strategy keeps, and say each step's peak?"""

import pytest
import torch
import torch.distributed as dist

from sherd import CommPolicy, MixedPrecisionPolicy
from sherd.memory.report import memory_report, track_memory
from sherd.policy import Level
from tests.strategies.cases import sharded
from tests.support.models import build

COPIES, OPTIMIZER, GRADIENTS, PARAMETERS = Level
STRATEGIES = (
    (COPIES, COPIES),
    (COPIES, OPTIMIZER),
    (OPTIMIZER, OPTIMIZER),
    (GRADIENTS, GRADIENTS),
    (OPTIMIZER, GRADIENTS),
    (COPIES, PARAMETERS),
    (OPTIMIZER, PARAMETERS),
)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = MixedPrecisionPolicy()


def step(model):
    for parameter in model.parameters():
        parameter.grad = None
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()


def peaks(cut, transport, precision):
    """By strategy: predicted before a step was watched, and after one; measured."""
    found = []
    for levels in STRATEGIES:
        model = sharded(build("mlp"), levels, cut, (2, 2), comm_policy=CommPolicy(transport), mp_policy=precision)
        step(model)
        for parameter in model.parameters():
            parameter.grad = None
        before = memory_report(model).predicted_peak
        with track_memory(model):
            step(model)
        for parameter in model.parameters():
            parameter.grad = None
        after = memory_report(model)
        found.append((before, after.predicted_peak, after.measured_peak))
    return found


@pytest.mark.parametrize(
    ("cut", "transport", "precision"),
    [("rows", "torch", FULL), ("flat", "auto", LOW)],
)
def test_the_peak_of_a_step_is_predicted_under_every_strategy(world, cut, transport, precision):
    for found in world(4).run(peaks, cut, transport, precision):
        for levels, (before, after, measured) in zip(STRATEGIES, found, strict=True):
            assert after == pytest.approx(measured, rel=0.02), levels
            assert measured <= before <= 1.02 * measured, levels


def kept_between_steps(levels):
    """Bytes of one block by kind, after steps: the shards' own and what is kept unsharded of them."""
    model = sharded(build("mlp"), levels, "flat", (2, 2))
    step(model)
    by_kind = {}
    for row in memory_report(model).rows:
        if row.unit == "blocks.0" and row.now:
            by_kind[row.kind] = row.now
    return by_kind


@pytest.mark.parametrize(
    ("levels", "shards", "whole", "gradients"),
    [
        ((COPIES, COPIES), 4, 0, 4),
        ((COPIES, OPTIMIZER), 0, 4, 2),
        ((OPTIMIZER, OPTIMIZER), 0, 4, 1),
        ((COPIES, PARAMETERS), 2, 0, 2),
        ((OPTIMIZER, PARAMETERS), 2, 0, 1),
        ((PARAMETERS, PARAMETERS), 1, 0, 1),
    ],
)
def test_each_strategy_keeps_its_quarters_of_a_unit(world, levels, shards, whole, gradients):
    """Of a whole over (2, 2) ranks, in quarters; what is kept unsharded holds the shards."""
    quarter = sum(each.nbytes for each in build("mlp").blocks[0].parameters()) / 4
    for found in world(4).run(kept_between_steps, levels):
        for kind, quarters in (("shards", shards), ("unsharded", whole), ("gradients", gradients)):
            assert found.get(kind, 0) == pytest.approx(quarters * quarter, rel=0.25), (kind, found)
