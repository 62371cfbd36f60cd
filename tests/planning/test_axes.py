"""Steps on the axes of tensor, context, expert and pipeline parallelism run as they are predicted."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from sherd.cli.planned_axes import TrainedLayout, spread_evenly
from sherd.policy import CommPolicy
from sherd.schedule.moments import MemoryKind
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.simulate import predict as predict_module
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.predict import predict
from sherd.tools.simulate.settings import AXES, Mesh, Settings
from sherd.tools.simulate.sharded import Optimizer
from sherd.train.axes import Axes
from sherd.train.config import Config
from sherd.train.mesh import RankGrid
from sherd.train.parallel import blocks_of, cut, on_meta, own_layers, run_as_asked, shard
from sherd.train.passes import passes
from tests.planning.played import engine, settled

SAMPLES, LENGTH, MICRO_BATCHES = 2, 32, 5
ADAMW = Optimizer(states=2, accesses=20, scalars=4)


def config(experts, layers, pp=1, dp=1, replicate=1, recompute=None, num=MICRO_BATCHES, **axes):
    batch = SAMPLES * dp * replicate * (1 if pp == 1 else num)
    layers = layers or (3 if pp == 1 else 4)
    model = {"layers": layers, "width": 64, "heads": 8, "kv_heads": 4, "hidden": 96, "tied": False, "experts": experts}
    return Config.of(
        {
            "model": model,
            "data": {"context": LENGTH},
            "optimizer": {"batch": batch, "micro_batch": SAMPLES},
            "run": {"checkpointing": recompute is not None, "recompute": recompute or "full"},
        }
    )


def recorded(experts=0, layers=None, recompute=None, on=range(4), micro_batches=MICRO_BATCHES, **axes):
    """The timeline of a settled step, on the ranks `on`; None on the others."""
    of = config(experts, layers, recompute=recompute, num=micro_batches, **axes)
    grid = RankGrid(Axes(**axes), "cpu")
    model = on_meta(of)
    own_layers(model, grid.stage, grid.axes.pp)
    cut(model, grid, of)
    spread_evenly(model, grid.ep)
    run_as_asked(blocks_of(model), of)
    shard(model, grid, comm_policy=CommPolicy("torch"))
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    run, batch = passes(model, grid, of), torch.randint(256, (SAMPLES, LENGTH))
    num = 1 if grid.pp is None else micro_batches
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return settled(model, optimizer, lambda: run.train([(batch, batch)] * num, num), on)


def predicted(experts=0, layers=None, recompute=None, micro_batches=MICRO_BATCHES, **axes):
    of = config(experts, layers, num=micro_batches, **axes)
    layout = TrainedLayout(own_or_usual_loss, config=of, names=("tp", "cp", "ep", "pp"))
    training = Training(
        on_meta(of), lambda samples: (torch.zeros(samples, LENGTH, dtype=torch.int64, device="meta"),), layout, ADAMW
    )
    mesh = Mesh(**{AXES[name]: size for name, size in ({"dp": 1} | axes).items()})
    settings = Settings(mesh, micro_batch=SAMPLES, micro_batches=1 if mesh.pp == 1 else micro_batches)
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
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"experts": 4, "dp": 4, "ep": 2},
    {"experts": 4, "dp": 2, "ep": 2, "tp": 2},
    {"replicate": 2, "tp": 2},
    {"dp": 2, "tp": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "recompute": "selective"},
    {"dp": 2, "cp": 2, "recompute": "selective"},
    {"experts": 4, "dp": 4, "ep": 2, "recompute": "selective"},
]
PIPELINES = [{"dp": 2, "pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_on_other_axes_runs_as_it_is_predicted(world, way):
    plan = predicted(**way)
    *_, trace = world(4).run(recorded, **way, on=[3])  # the last part of a sample's tokens, where attention sees all
    assert calls(plan) == calls(trace)
    assert plan.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)
    if "experts" not in way or "tp" not in way:  # there the peak is at another moment
        assert_same_buffers(plan, trace)


@pytest.fixture(scope="module")
def stages(world):
    """Returns the plan of a pipeline and its largest trace; each is made once."""

    def made(**way):
        return predicted(**way), max(world(4).run(recorded, **way), key=lambda each: each.peak.nbytes)

    return cache(made)


@pytest.mark.parametrize("way", PIPELINES, ids=str)
def test_a_stage_of_a_pipeline_runs_as_it_is_predicted(stages, way):
    plan, trace = stages(**way)
    assert in_all(calls(plan)) == in_all(calls(trace))  # the last gather of backward is of no unit's in a plan
    assert plan.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)
    assert_same_buffers(plan, trace)


@pytest.mark.parametrize("num", [MICRO_BATCHES, pytest.param(9, marks=pytest.mark.slow)])
def test_the_last_stage_has_the_last_output_and_the_last_gradient_that_it_sent(world, monkeypatch, num):
    planned, way = [], {"pp": 4, "recompute": "full", "micro_batches": num}
    monkeypatch.setattr(
        predict_module, "predict", lambda *of, **words: planned.append(predict(*of, **words)) or planned[-1]
    )
    predicted(**way)
    *_, trace = world(4).run(recorded, **way, on=[3])
    assert planned[-1].timeline.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_of_a_stage_that_are_computed_again_save_what_is_predicted(stages, recompute):
    way = {"pp": 4, "layers": 16}  # so many that the first stage is the largest, also where blocks are computed again
    plan, trace = stages(**way)
    less, of_less = stages(**way, recompute=recompute)
    assert plan.peak.nbytes - less.peak.nbytes == trace.peak.nbytes - of_less.peak.nbytes > 0


def in_all(calls):
    sums = Counter()
    for (lane, name, _), nbytes in calls.items():
        sums[lane, name] += 0 if name == "send" else nbytes  # torch sends in pairs, of which a trace sees no bytes
    return sums
