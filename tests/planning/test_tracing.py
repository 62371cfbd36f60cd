"""A recorded step is what has happened: every byte that an independent follower sees, and every collective."""

import gc
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import sherd
from bench.peak import LiveBytes
from sherd._torch import imagined_ranks
from sherd.errors import ModuleError, StateError
from sherd.layout.runs import Flat
from sherd.policy import CommPolicy, MixedPrecisionPolicy
from sherd.tools.plan.files import from_json, to_json
from sherd.tools.plan.tracing import traced
from sherd.tools.simulate.timeline import Lane
from tests.planning.models import next_token
from tests.planning.tied_stack import Stack, composed, tokens, wrapped
from tests.support.meshes import mesh_of


def recorded(make, micro_batches=1):
    """The third step of what `make` returns, and the most bytes alive in it by another follower."""
    model, batch = make(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        with sherd.accumulate(model, micro_batches):
            for _ in range(micro_batches):
                next_token(model, batch).backward()
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
    "one dimension, torch's calls": partial(composed, comm_policy=CommPolicy("torch")),
    "one dimension, shared memory": composed,
    "runs, torch's calls": partial(composed, placement=Flat(), comm_policy=CommPolicy("torch")),
    "runs, gloo": partial(composed, placement=Flat(), comm_policy=CommPolicy("gloo")),
    "runs, shared memory": partial(composed, placement=Flat()),
    "mixed precision": partial(composed, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "kept": partial(composed, reshard_after_forward=False),
    "checkpoints": partial(composed, checkpoints=1.0),
    "wrapper": wrapped,
    "wrapper, flat parameters": partial(wrapped, use_orig_params=False),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_is_that_of_all_tensors(world, way, micro_batches):
    for timeline, peak in world(2).run(recorded, WAYS[way], micro_batches):
        assert timeline.peak.nbytes == peak
        assert sum(timeline.peak.by_kind.values()) == sum(timeline.peak.by_unit.values()) == peak
        assert not timeline.is_predicted
        assert from_json(to_json(timeline)) == timeline


def test_a_step_over_replicas_is_recorded(world):
    for timeline, peak in world(4).run(recorded, over_replicas):
        assert timeline.peak.nbytes == peak
        assert sum(each.lane is Lane.ALL_REDUCE and each.nbytes > 0 for each in timeline.spans) == 5


def over_replicas():
    return composed(mesh=mesh_of((2, 2)))


def test_spans_are_what_the_schedule_does(world):
    (timeline, _), _ = world(2).run(recorded, WAYS["one dimension, torch's calls"], 2)
    sent = Counter((each.lane, each.unit) for each in timeline.spans if each.nbytes)
    blocks = range(1, 5)
    assert all(sent[Lane.REDUCE, unit] == 2 for unit in (0, *blocks))
    assert all(sent[Lane.GATHER, unit] in (2, 3, 4) for unit in blocks)
    names = [each.name for each in timeline.spans if each.lane is Lane.COMPUTE and each.unit == 1]
    for before, after in (("forward", "backward"), ("wait", "forward"), ("backward", "copy in"), ("wait", "free")):
        assert names.index(before) < len(names) - names[::-1].index(after)
    ends = [each.end for each in timeline.spans if each.lane is Lane.COMPUTE]
    assert ends == sorted(ends)
    assert max(ends) == timeline.seconds
    assert timeline.exposed[Lane.GATHER.value] > 0
    assert [each.name for each in timeline.units] == ["Stack", *(f"blocks.{number}" for number in range(4))]


def test_what_is_alive_is_told_by_its_purpose(world):
    (timeline, _), _ = world(2).run(recorded, WAYS["checkpoints"])
    kinds = {each.kind for each in timeline.changes}
    assert {"activations", "inputs", "temporaries", "logits", "optimizer state", "shards", "unsharded"} <= kinds
    assert any(each.name == "recompute" for each in timeline.spans)
    at_rest = Counter()
    for each in timeline.changes:
        if each.time == 0:
            at_rest[each.kind] += each.nbytes
    assert at_rest["inputs"] == tokens().nbytes
    assert at_rest["optimizer state"] == 2 * at_rest["shards"] + 4 * len(list(Stack().parameters()))
    # Blocks keep only their inputs.
    assert any(each.kind == "activations" and each.nbytes > 0 for each in timeline.changes)
    (plain, _), _ = world(2).run(recorded, composed)
    assert plain.peak.by_kind["activations"] > 2 * timeline.peak.by_kind["activations"]


def test_wrong_uses_are_refused_and_nothing_is_left_behind():
    with imagined_ranks(2):
        model, batch = composed(), tokens(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hooks, resize = list(model._forward_hooks), torch.UntypedStorage.resize_
        with pytest.raises(ModuleError, match="traced expects"), traced(nn.Linear(2, 2), optimizer):
            pass
        with traced(model, optimizer) as trace:
            with pytest.raises(StateError, match="not over"):
                trace.timeline  # noqa: B018
            with pytest.raises(StateError, match="tracked already"), traced(model, optimizer):
                pass
            model(batch).sum().backward()
            optimizer.step()
            model(batch)  # the step is over
        with pytest.raises(ValueError, match="lunch"), traced(model, optimizer):
            raise ValueError("lunch")
        model(batch).sum().backward()
        assert torch.UntypedStorage.resize_ is resize
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert list(model._forward_hooks) == hooks
    assert trace.timeline.spans[-1].name == "optimizer"
    assert trace.timeline.peak.nbytes > 0
