"""Steps over tensor and context parallelism run as they are predicted."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from sherd import auto_shard
from sherd._torch import all_gather_single, reduce_scatter_single
from sherd.cli.planned_model import trained_layout
from sherd.policy import CommPolicy
from sherd.schedule.moments import MemoryKind
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.settings import AXES, Mesh, Settings
from sherd.tools.simulate.sharded import Optimizer
from sherd.train.axes import Axes
from sherd.train.config import Config
from sherd.train.mesh import RankGrid
from sherd.train.models import rotate
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


# A function of a program's own lays the decoder over cp: samples are cut by tokens, keys and values gathered.


class Gathered(torch.autograd.Function):
    """All ranks' parts of the last dim but one. Backward sums the gradients of each part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = part.new_empty(group.size(), *part.shape)
        all_gather_single(parts.view(-1), part.contiguous().view(-1), group=group)
        return parts.movedim(0, -3).flatten(-3, -2)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.unflatten(-2, (ctx.group.size(), -1)).movedim(-3, 0).contiguous()
        part = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(part.view(-1), parts.view(-1), group=ctx.group)
        return part, None


def attend(attention, group, x, cos, sin):
    q, k, v = (attention._heads(each(x)) for each in (attention.query, attention.key, attention.value))
    k, v = Gathered.apply(torch.stack((rotate(k, cos, sin), v)), group)
    mixed = scaled_dot_product_attention(rotate(q, cos, sin), k, v, enable_gqa=True)
    return attention.out(mixed.transpose(1, 2).flatten(2))


def cut_samples(model, cp):
    forward, rank = model.forward, cp.get_local_rank()
    model.forward = lambda tokens: forward(tokens.chunk(cp.size(), dim=1)[rank])
    for block in model.blocks:
        block.attention.forward = partial(attend, block.attention, cp.get_group())


def part_loss(model, batch):
    logits = model(batch[0])
    return cross_entropy(logits.float().flatten(0, 1), batch[0][:, : logits.shape[1]].flatten())


OWN = ModelLayout(part_loss, cuts={"cp": cut_samples})


def recorded_over(mesh, on):
    model = on_meta(OF)
    laid = OWN.lay(model, mesh)
    laid.shard(model, comm_policy=CommPolicy("torch"))
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    batch, optimizer = torch.randint(256, (SAMPLES, LENGTH)), torch.optim.AdamW(model.parameters(), fused=True)
    return settled(model, optimizer, lambda: laid.loss(model, (batch,)).backward(), on)


@pytest.mark.parametrize("mesh", [Mesh(2, cp=2)], ids=str)
def test_a_step_over_parts_of_samples_runs_as_it_is_predicted(world, mesh):
    tokens = partial(torch.zeros, dtype=torch.int64, device="meta")
    training = Training(on_meta(OF), lambda samples: (tokens((samples, LENGTH)),), OWN, ADAMW)
    plan = Planner(training, read_cluster("laptop")).predict(Settings(mesh, micro_batch=SAMPLES)).timeline
    *_, trace = world(4).run(recorded_over, mesh, on=[3])
    assert calls(plan) == calls(trace)
    assert plan.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)
    assert_same_buffers(plan, trace)
