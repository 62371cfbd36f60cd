"""`offload_activations` where there is no other memory, and what it refuses."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import sherd
from sherd.engine.moves import offload
from sherd.engine.run.unit import Unit
from sherd.errors import ModuleError, PolicyError, PolicyTypeError
from tests.api.checks import assert_refuses, assert_trains
from tests.support.models import chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded


def offloaded(model, rank, step):
    is_sharded = any(isinstance(each, sherd.FSDPModule | sherd.FullyShardedDataParallel) for each in model.modules())
    with sherd.offload_activations(model, min_bytes=0) if is_sharded else nullcontext():
        loss = model(noise(step, rank, 4, 8)).square().mean()
    return loss


@pytest.mark.parametrize("front", ["shard", "wrapper"])
@on_threads(2)
def test_on_a_cpu_it_changes_nothing(front):
    model = sharded(chain(), front)
    assert_trains(model, chain, offloaded)
    assert not offload._by_device


@on_threads(2)
def test_on_a_cpu_a_policy_changes_nothing():
    model = sharded(chain(), offload_policy=sherd.OffloadPolicy(activations="host"))
    assert_trains(model, chain, lambda model, rank, step: model(noise(step, rank, 4, 8)).square().mean())
    assert not offload._by_device


@on_threads(2)
def test_what_means_nothing_is_refused():
    model = sharded(chain())
    for arguments, kind, words in (
        ({"budget": -1}, PolicyError, ("budget=-1", "0 or more")),
        ({"budget": 1.5}, PolicyTypeError, ("budget=1.5", "expected an int")),
        ({"budget": None}, PolicyTypeError, ("budget=None", "expected an int")),
        ({"budget": True}, PolicyTypeError, ("budget=True", "expected an int")),
        ({"min_bytes": -1}, PolicyError, ("min_bytes=-1", "0 or more")),
        ({"min_bytes": "1 MiB"}, PolicyTypeError, ("min_bytes='1 MiB'", "expected an int")),
        ({"pin_memory": 1}, PolicyTypeError, ("pin_memory=1", "expected a bool")),
    ):
        assert_refuses(lambda given=arguments: sherd.offload_activations(model, **given), kind, *words)
    assert_refuses(
        lambda: sherd.offload_activations(nn.Linear(2, 2)), ModuleError, "Linear", "offload_activations", "fully_shard"
    )
    assert_trains(model, chain)


@on_threads(1)
def test_the_context_holds_for_forwards_inside_of_it_and_the_innermost_one_counts(monkeypatch):
    """Each unit's saves are turns of their own; what is outside of units, or a parameter, is not offered."""
    log = []

    def offload_saved(unit, terms):
        unit.backward.offload_saved(lambda _, turn: log.append((terms.budget, turn)))  # all stay

    monkeypatch.setattr(Unit, "offload_saved", offload_saved)
    model, x = sharded(chain()), noise(0, 0, 4, 8)

    def names(context):
        log.clear()
        with context:
            model(x).square().mean()
        return [name for name, _ in log]

    once = names(sherd.offload_activations(model, budget=1))
    assert once
    assert set(once) == {1}
    assert len({id(turn) for _, turn in log}) > 1
    with sherd.offload_activations(model, budget=2):
        assert names(sherd.offload_activations(model, budget=1)) == once
        assert set(names(nullcontext())) == {2}
        with torch.no_grad():
            assert not names(nullcontext())
        with pytest.raises(ZeroDivisionError), sherd.offload_activations(model, budget=3):
            raise ZeroDivisionError
        assert set(names(nullcontext())) == {2}
    assert not names(nullcontext())
