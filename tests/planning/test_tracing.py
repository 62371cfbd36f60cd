"""Is a recorded step what has happened: every byte that an independent follower sees, and every collective?"""

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sherd
from bench.peak import LiveBytes
from sherd.errors import ModuleError, StateError
from sherd.layout.runs import Flat
from sherd.planning.files import from_json, to_json
from sherd.planning.tracing import traced
from sherd.policy import CommPolicy, MixedPrecisionPolicy
from sherd.schedule.moments import MemoryKind
from sherd.simulate.timeline import Lane
from sherd.simulate.work import TensorKind

WIDTH, ROWS = 64, 16
ENGINE = {kind.value for kind in MemoryKind}


class Tied(nn.Module):
    """Two blocks between an embedding and a head that share a weight."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.head(x)


def composed(mesh=None, checkpoints=False, **options):
    torch.manual_seed(0)
    model = Tied(checkpoints)
    for each in (*model.blocks, model):
        sherd.fully_shard(each, mesh=mesh, **options)
    return model


def wrapped(use_orig_params=True, **options):
    torch.manual_seed(0)
    return sherd.FullyShardedDataParallel(
        Tied(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or type(module) is nn.Sequential,
        use_orig_params=use_orig_params,
        **options,
    )


def recorded(model, micro_batches=1):
    """The third step of `model`, and the most bytes alive in it by another follower."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(ROWS * 8).view(ROWS, 8) % 50

    def step():
        with sherd.accumulate(model, micro_batches):
            for _ in range(micro_batches):
                F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with LiveBytes() as live:
        step()
        optimizer.zero_grad()
        gc.collect()
        live.forget_peak()
        with traced(model, optimizer) as trace:
            step()
    return trace.timeline, live.peak


WAYS = {
    "one dimension, torch's calls": (composed, {"comm_policy": CommPolicy("torch")}),
    "one dimension, shared memory": (composed, {}),
    "runs, torch's calls": (composed, {"placement": Flat(), "comm_policy": CommPolicy("torch")}),
    "runs, gloo": (composed, {"placement": Flat(), "comm_policy": CommPolicy("gloo")}),
    "runs, shared memory": (composed, {"placement": Flat()}),
    "mixed precision": (composed, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "kept": (composed, {"reshard_after_forward": False}),
    "checkpoints": (composed, {"checkpoints": True}),
    "wrapper": (wrapped, {}),
    "wrapper, flat parameters": (wrapped, {"use_orig_params": False}),
}


def peaks(way, micro_batches=1):
    make, options = WAYS[way]
    timeline, peak = recorded(make(**options), micro_batches)
    return timeline, peak


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_is_that_of_all_tensors(world, way, micro_batches):
    for timeline, peak in world(2).run(peaks, way, micro_batches):
        assert timeline.peak.nbytes == peak
        assert sum(timeline.peak.by_kind.values()) == sum(timeline.peak.by_unit.values()) == peak
        assert not timeline.is_predicted
        assert from_json(to_json(timeline)) == timeline
