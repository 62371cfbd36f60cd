"""Steps over tensor parallelism run as they are predicted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sherd import auto_shard
from sherd.cli.planned_axes import trained_layout
from sherd.policy import CommPolicy
from sherd.schedule.moments import MemoryKind
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.settings import AXES, Mesh, Settings
from sherd.tools.simulate.sharded import Optimizer
from sherd.train.axes import Axes
from sherd.train.config import Config
from sherd.train.mesh import RankGrid
from sherd.train.parallel import cut_tensors, on_meta, run_as_asked
from sherd.train.passes import Passes
from tests.planning.played import engine, settled

SAMPLES, LENGTH = 2, 32
ADAMW = Optimizer(states=2, accesses=20, scalars=4)
OF = Config(layers=3, width=64, heads=8, kv_heads=4, hidden=96, tied=False, context=LENGTH, micro_batch=SAMPLES)


def recorded(recompute=None, on=range(4), **axes):
    """The timeline of a settled step, on the ranks `on`; None on the others."""
    of = replace(OF, checkpointing=float(recompute is not None), recompute=recompute or "full")
    grid = RankGrid(Axes(**axes), "cpu")
    model = on_meta(of)
    cut_tensors(model, grid.tp)
    run_as_asked(model.blocks, of)
    auto_shard(model, mesh=grid.data, comm_policy=CommPolicy("torch"))
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    run, batch = Passes(model, grid), torch.randint(256, (SAMPLES, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return settled(model, optimizer, lambda: run.train([(batch, batch)], 1), on)


def predicted(recompute=None, **axes):
    training = Training(
        on_meta(OF),
        lambda samples: (torch.zeros(samples, LENGTH, dtype=torch.int64, device="meta"),),
        trained_layout(OF),
        ADAMW,
    )
    mesh = Mesh(**{AXES[name]: size for name, size in ({"dp": 1} | axes).items()})
    settings = Settings(mesh, micro_batch=SAMPLES)
    if recompute is not None:
        settings = replace(settings, checkpointing=1.0, recompute=recompute)
    return Planner(training, read_cluster("laptop")).predict(settings).timeline


def assert_same_buffers(plan, trace):
    # Of gradients that are parts of a sum over tp, which are summed on arrival, a trace has some as temporaries.
    planned, found = (engine(each.peak.by_kind, without=[MemoryKind.ARRIVED]) for each in (plan, trace))
    assert planned == found


def calls(timeline):
    """Bytes by lane, kind and unit. A unit with several groups has one span in a trace, and one for each in a plan."""
    sums = Counter()
    for each in timeline.spans:
        sums[each.lane.value, each.name, each.unit] += each.nbytes
    return {key: nbytes for key, nbytes in sums.items() if nbytes}


WAYS = [
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"replicate": 2, "tp": 2},
    {"dp": 2, "tp": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "recompute": "selective"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_over_tensor_parallelism_runs_as_it_is_predicted(world, way):
    plan = predicted(**way)
    *_, trace = world(4).run(recorded, **way, on=[3])
    assert calls(plan) == calls(trace)
    assert plan.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)
    assert_same_buffers(plan, trace)
