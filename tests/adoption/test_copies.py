"""Is a deep copy of a sharded model a model of its own?"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import ModuleError, StateError
from tests.adoption.adapters import adapt, assert_alike, net, plain_steps, sgd, shards, steps, text_of
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, noise


def copied(front_end="fully_shard", outside=False, **options):
    """A model, trained; a copy of it, trained further by itself; and the first, trained further after that."""
    model = shards(net(), front_end, **options)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(model))
    optimizer = sgd(model)
    steps(model, optimizer)
    holder = copy.deepcopy(nn.ModuleList([model]) if outside else [model])
    twin = holder[0]
    assert type(twin) is type(model)
    assert_named_close(whole_params(twin), whole_params(model), "parameter", 0, 0)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one is not other
        assert one.placements == other.placements
        assert not one.to_local().numel() or one.to_local().data_ptr() != other.to_local().data_ptr()
    before = whole_params(model)
    steps(twin, sgd(twin), first=3)
    assert_named_close(whole_params(model), before, "parameter", 0, 0)
    assert len(calls) == 6  # the user's own hooks are copied
    trained = whole_params(twin)
    gone = weakref.ref(twin)
    steps(model, optimizer, first=6)
    assert_named_close(whole_params(twin), trained, "parameter", 0, 0)
    del holder, twin, one, other
    gc.collect()
    assert gone() is None
    return trained, whole_params(model)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {}),
        (2, {"front_end": "wrapper"}),
        (2, {"outside": True}),
        (2, {"placement": sherd.Flat()}),
        (4, {"mesh_shape": (2, 2)}),
        (2, {"placements": "zero1"}),
        (2, {"offload_policy": sherd.CPUOffloadPolicy()}),
    ],
    ids=str,
)
def test_a_copy_trains_by_itself(world, num_ranks, settings):
    plain = net()
    optimizer = sgd(plain)
    plain_steps(plain, optimizer, num_ranks)
    twin = copy.deepcopy(plain)
    plain_steps(twin, sgd(twin), num_ranks, first=3)
    plain_steps(plain, optimizer, num_ranks, first=6)
    found = world(num_ranks).run(copied, **settings)
    assert_alike([each for each, _ in found], twin)
    assert_alike([each for _, each in found], plain)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.embed.weight.kind = "tied"

    def forward(self, x):
        return self.encode(x).relu() @ self.head.weight

    def encode(self, x):
        return self.embed(x)


def tied():
    model = Tied()
    sherd.fully_shard(model.embed)
    sherd.fully_shard(model.head)
    sherd.fully_shard(model)
    sherd.register_fsdp_forward_method(model, "encode")
    part = text_of(lambda: copy.deepcopy(model.head), ModuleError)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.head.weight is not model.head.weight
    assert twin.embed.weight.kind == "tied"
    torch.testing.assert_close(twin.encode(noise(0, 0)), model.encode(noise(0, 0)), rtol=0, atol=0)
    return part


def test_ties_and_methods_are_copied(world):
    for part in world(2).run(tied):
        assert "cannot be deep-copied by itself" in part


def one_unit():
    """A block alone, units of several modules, a copy before the first step, a copy that is changed."""
    model = net()
    sherd.fully_shard([model[0], model[1]])
    sherd.fully_shard(model)
    twin = copy.deepcopy(model)
    steps(twin, sgd(twin))
    block = copy.deepcopy(model[0])
    assert block is not model[0]
    third = copy.deepcopy(twin)
    adapt(third)
    assert sherd.refresh(third).adopted
    steps(third, sgd(third))
    return whole_params(twin)


def test_units_of_several_modules_are_copied_together(world):
    plain = net()
    plain_steps(plain, sgd(plain), 2)
    assert_alike(world(2).run(one_unit), plain)


def refused():
    model = sherd.FullyShardedDataParallel(net())
    flat = text_of(lambda: copy.deepcopy(model), ModuleError)
    model = shards(net())
    with sherd.unsharded(model):
        lent = text_of(lambda: copy.deepcopy(model), StateError)
    return flat, lent


def test_flat_parameters_are_refused(world):
    for flat, lent in world(2).run(refused):
        assert "use_orig_params=True" in flat
        assert "unshard context" in lent
