"""The memory report knows what each strategy keeps, and says each step's peak."""

import pytest
import torch
import torch.distributed as dist

from sherd import CommPolicy, MixedPrecisionPolicy
from sherd.memory.report import memory_report, track_memory
from sherd.policy import Level
from tests.strategies.cases import sharded
from tests.support.models import build
from tests.support.ranks.bodies import on_processes

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
    model.zero_grad()
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()


@pytest.mark.parametrize(
    ("cut", "transport", "precision"),
    [("rows", "torch", FULL), ("flat", "auto", LOW)],
)
@on_processes(4)
def test_the_peak_of_a_step_is_predicted_under_every_strategy(cut, transport, precision):
    """Before a step was watched and after one."""
    for levels in STRATEGIES:
        model = sharded(build("mlp"), levels, cut, (2, 2), comm_policy=CommPolicy(transport), mp_policy=precision)
        step(model)
        model.zero_grad()
        before = memory_report(model).predicted_peak
        with track_memory(model):
            step(model)
        model.zero_grad()
        after = memory_report(model)
        assert after.predicted_peak == pytest.approx(after.measured_peak, rel=0.02), levels
        assert after.measured_peak <= before <= 1.02 * after.measured_peak, levels


# Of a whole over (2, 2) ranks, in quarters: shards, what is kept unsharded, which holds the shards, and gradients.
KEPT = {
    (COPIES, COPIES): (4, 0, 4),
    (COPIES, OPTIMIZER): (0, 4, 2),
    (OPTIMIZER, OPTIMIZER): (0, 4, 1),
    (COPIES, PARAMETERS): (2, 0, 2),
    (OPTIMIZER, PARAMETERS): (2, 0, 1),
    (PARAMETERS, PARAMETERS): (1, 0, 1),
}


@on_processes(4)
def test_each_strategy_keeps_its_quarters_of_a_unit():
    quarter = sum(each.nbytes for each in build("mlp").blocks[0].parameters()) / 4
    for levels, quarters in KEPT.items():
        model = sharded(build("mlp"), levels, "flat", (2, 2))
        step(model)
        kept = {row.kind: row.now for row in memory_report(model).rows if row.unit == "blocks.0" and row.now}
        for kind, number in zip(("shards", "unsharded", "gradients"), quarters, strict=True):
            assert kept.get(kind, 0) == pytest.approx(number * quarter, rel=0.25), (levels, kind)
