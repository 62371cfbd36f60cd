"""A stage of a pipeline runs as it is predicted: a layout of a program's own."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy

from sherd import auto_shard
from sherd.interop.pipelining import PipelineStage
from sherd.policy import CommPolicy
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.simulate import predict as predict_module
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.predict import predict
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.train.parallel import on_meta, run_as_asked
from tests.planning.played import settled
from tests.planning.test_axes import ADAMW, LENGTH, OF, SAMPLES, assert_same_buffers, calls

MICRO_BATCHES = 5
CPU = torch.device("cpu")


class Elsewhere(nn.Module):
    """In the place of a module that another stage has: what comes in goes on."""

    weight = None

    def forward(self, x, *others):
        return x


def own_layers(model, number, num_stages):
    """Keep the layers of one stage."""
    each = list(model.blocks)
    model.blocks = nn.ModuleList(b for at, b in enumerate(each) if at * num_stages // len(each) == number)
    if number > 0:
        model.embedding = Elsewhere()
    if number < num_stages - 1:
        model.norm, model.head = Elsewhere(), Elsewhere()
    return model


def losses(logits, targets):
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def stage_loss(number, num_stages, model, batch):
    """The cross-entropy, or the sum of what a stage sends on, which has a gradient as large."""
    x = batch[0]
    if number > 0:
        x = torch.empty((*x.shape, OF.width), device="meta", requires_grad=True)
    out = model(x)
    return losses(out, batch[0]) if number == num_stages - 1 else out.sum()


@dataclass(frozen=True)
class Stages(ModelLayout):
    @property
    def axes(self):
        return ("pp",)

    def stage(self, model, number, num_stages):
        return own_layers(copy.deepcopy(model), number, num_stages)

    def stream_numel(self, batch, mesh):
        return int(batch[0].numel()) * OF.width

    def lay(self, model, mesh):
        number = dist.get_rank() * mesh.pp // dist.get_world_size()
        return replace(super().lay(model, mesh), loss=partial(stage_loss, number, mesh.pp))


def recorded(pp, dp=1, layers=4, recompute=None, on=range(4), num=MICRO_BATCHES):
    """The timeline of a settled step, on the ranks `on`; None on the others."""
    of = replace(OF, layers=layers, checkpointing=float(recompute is not None), recompute=recompute or "full")
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    model = own_layers(on_meta(of), number, pp)
    run_as_asked(model.blocks, of)
    auto_shard(model, mesh=mesh["dp"], comm_policy=CommPolicy("torch"))
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    tokens, stream = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), torch.empty(SAMPLES, LENGTH, OF.width)
    sent = torch.empty(SAMPLES, LENGTH, 256) if number == pp - 1 else stream.clone()
    shapes = {"input_args": tokens if number == 0 else stream.requires_grad_(), "output_args": sent.requires_grad_()}
    stage = PipelineStage(model, number, pp, CPU, group=mesh.get_group("pp"), **shapes)
    schedule = Schedule1F1B(stage, num, loss_fn=lambda *of: losses(*of) / num, scale_grads=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(256, (SAMPLES * num, LENGTH))

    def step():
        last = {"target": batch, "losses": []} if number == pp - 1 else {}
        schedule.step(*([batch] if number == 0 else []), **last, return_outputs=False)

    return settled(model, optimizer, step, on)


def predicted(pp, dp=1, layers=4, recompute=None, num=MICRO_BATCHES):
    tokens = lambda samples: (torch.zeros(samples, LENGTH, dtype=torch.int64, device="meta"),)  # noqa: E731
    training = Training(on_meta(replace(OF, layers=layers)), tokens, Stages(losses), ADAMW)
    settings = Settings(Mesh(dp, pp=pp), micro_batch=SAMPLES, micro_batches=num)
    if recompute is not None:
        settings = replace(settings, checkpointing=1.0, recompute=recompute)
    return Planner(training, read_cluster("laptop")).predict(settings).timeline


@pytest.fixture(scope="module")
def stages(world):
    """Returns the plan of a pipeline and its largest trace; each is made once."""

    def made(**way):
        return predicted(**way), max(world(4).run(recorded, **way), key=lambda each: each.peak.nbytes)

    return cache(made)


@pytest.mark.parametrize("way", [{"pp": 2, "dp": 2}, {"pp": 4}], ids=str)
def test_a_stage_of_a_pipeline_runs_as_it_is_predicted(stages, way):
    plan, trace = stages(**way)
    assert in_all(calls(plan)) == in_all(calls(trace))  # the last gather of backward is of no unit's in a plan
    assert plan.peak.nbytes == pytest.approx(trace.peak.nbytes, rel=0.01)
    assert_same_buffers(plan, trace)


@pytest.mark.parametrize("num", [MICRO_BATCHES, pytest.param(9, marks=pytest.mark.slow)])
def test_the_last_stage_has_the_last_output_and_the_last_gradient_that_it_sent(world, monkeypatch, num):
    planned, way = [], {"pp": 4, "recompute": "full", "num": num}
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
