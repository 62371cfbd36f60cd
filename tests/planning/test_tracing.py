"""Is a recorded step what has happened: every byte that an independent follower sees, and every collective?"""

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
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


def test_a_step_over_replicas_is_recorded(world):
    for timeline, peak in world(4).run(of_replicas):
        assert timeline.peak.nbytes == peak
        assert sum(each.lane is Lane.ALL_REDUCE and each.nbytes > 0 for each in timeline.spans) == 4


def of_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return recorded(composed(mesh))


def test_spans_are_what_the_schedule_does(world):
    (timeline, _), _ = world(2).run(peaks, "one dimension, torch's calls", 2)
    sent = Counter((each.lane, each.unit) for each in timeline.spans if each.nbytes)
    blocks = range(1, 4)
    assert all(sent[Lane.REDUCE, unit] == 2 for unit in (0, *blocks))
    assert all(sent[Lane.GATHER, unit] in (2, 3, 4) for unit in blocks)
    names = [each.name for each in timeline.spans if each.lane is Lane.COMPUTE and each.unit == 1]
    for before, after in (("forward", "backward"), ("wait", "forward"), ("backward", "copy in"), ("wait", "free")):
        assert names.index(before) < len(names) - names[::-1].index(after)
    ends = [each.end for each in timeline.spans if each.lane is Lane.COMPUTE]
    assert ends == sorted(ends)
    assert max(ends) == timeline.seconds
    assert timeline.exposed[Lane.GATHER.value] > 0
    assert [each.name for each in timeline.units] == ["Tied", "blocks.0", "blocks.1", "blocks.2"]


def test_what_is_alive_is_told_by_its_purpose(world):
    (timeline, _), _ = world(2).run(peaks, "checkpoints")
    kinds = {each.kind for each in timeline.changes}
    assert {"activations", "inputs", "temporaries", "logits", "optimizer state", "shards", "unsharded"} <= kinds
    assert any(each.name == "recompute" for each in timeline.spans)
    at_rest = Counter()
    for each in timeline.changes:
        if each.time == 0:
            at_rest[each.kind] += each.nbytes
    assert at_rest["inputs"] == ROWS * 8 * 8
    assert at_rest["optimizer state"] == 2 * at_rest["shards"] + 4 * len(list(Tied().parameters()))
    # Blocks keep only their inputs.
    kept = sum(each.nbytes for each in timeline.changes if each.kind == "activations" and each.nbytes > 0)
    (plain, _), _ = world(2).run(peaks, "one dimension, shared memory")
    assert kept
    assert plain.peak.by_kind["activations"] > 2 * timeline.peak.by_kind["activations"]


def wrong_uses():
    model = composed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = list(model._forward_hooks)
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ModuleError, match="traced expects"), traced(nn.Linear(2, 2), optimizer):
        pass
    with traced(model, optimizer) as trace:
        with pytest.raises(StateError, match="not over"):
            trace.timeline  # noqa: B018
        with pytest.raises(StateError, match="tracked already"), traced(model, optimizer):
            pass
        model(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        model(torch.zeros(2, 2, dtype=torch.int64))  # the step is over
    with pytest.raises(ValueError, match="lunch"), traced(model, optimizer):
        raise ValueError("lunch")
    model(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    assert torch.UntypedStorage.resize_ is resize
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert list(model._forward_hooks) == hooks
    return trace.timeline.spans[-1].name, trace.timeline.peak.nbytes


def test_wrong_uses_are_refused_and_nothing_is_left_behind(world):
    for last, nbytes in world(2).run(wrong_uses):
        assert last == "optimizer"
        assert nbytes > 0
