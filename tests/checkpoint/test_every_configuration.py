"""What was saved in one configuration on some ranks loads in every other one on every other number of ranks.

One folder per configuration and number of saving ranks. A loading rank keeps one model per configuration and turns
them: in turn t, number i loads what number i + t has saved. In an ordinary run two numbers of ranks meet in one of the
turns, and each turn comes with some of the numbers.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd import FullyShardedDataParallel as FSDP
from sherd import MixedPrecision
from sherd.checkpoint.encoding import read_tensor
from sherd.storage.files import Opened
from sherd.storage.places import place_of
from sherd.wrap import ModuleWrapPolicy
from tests.checkpoint.layouts import LAYOUTS, Odd, built, model_in, optimizer_of, train
from tests.support import checkpoints
from tests.support.comparing import assert_same, plain_name, whole
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes
from tests.support.suites import part

SAVED, GONE_ON = range(1), range(1, 2)
WORLDS = (1, 2, 3, 4)
# What this number of ranks has trained, every number of ranks trains on.
GOING_ON_FROM = 3


def wrapped(seed, use_orig_params):
    model = built(seed)
    for odd in model.blocks:
        odd.short.data = odd.short.data.float()  # a flat parameter has one dtype
        odd.fixed.requires_grad_()
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Odd}),
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        use_orig_params=use_orig_params,
    )


def replicated(seed, layout):
    """HSDP on an even number of ranks."""
    size = dist.get_world_size()
    outer = 2 if size % 2 == 0 else 1
    return model_in(layout, seed, mesh=mesh_of((outer, size // outer)))


ONE_MODEL = {
    **{layout: lambda seed, layout=layout: model_in(layout, seed) for layout in LAYOUTS},
    **{f"hsdp {layout}": functools.partial(replicated, layout=layout) for layout in ("rows", "flat", "whole")},
}
WRAPPED = {"wrapper": lambda seed: wrapped(seed, True), "wrapper flat": lambda seed: wrapped(seed, False)}
"""By name, a model in one configuration. Those of the wrapper have another dtype, and load from each other alone."""


def save(model, optimizer, folder):
    items = {"model": model, "optimizer": optimizer}
    path = sherd.save(folder, items, step=7, per_rank={"rank": dist.get_rank()}, user=dist.get_world_size())
    assert path.endswith("step-00000007")


def load(model, optimizer, folder):
    restored = sherd.load(folder, {"model": model, "optimizer": optimizer})
    is_same = restored.user == restored.world_size == dist.get_world_size()
    assert restored.per_rank == ({"rank": dist.get_rank()} if is_same else {})


# By what saves: how, and the families of configurations that load from each other.
WAYS = {
    "torch": (checkpoints.save, checkpoints.load, [ONE_MODEL]),
    "sherd": (save, load, [ONE_MODEL, WRAPPED]),
}


def values_of(model, optimizer):
    """All values by name, gathered in another way than a checkpoint is written."""
    with sherd.unsharded(model, writeback=False):
        values = {plain_name(name): whole(each) for name, each in model.named_parameters(remove_duplicate=False)}
    values |= whole(dict(model.named_buffers()))
    return values, FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def spoil(model, optimizer):
    """Numbers that no load may leave."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers(), *states):
            each.fill_(-77)


def save_all(way, folder):
    """Train a step in every configuration and save; note the whole values, and the losses of the steps that follow."""
    save, _, families = WAYS[way]
    for name, build in [each for family in families for each in family.items()]:
        model = build(0)
        optimizer = optimizer_of(model)
        train(model, optimizer, SAVED)
        save(model, optimizer, f"{folder}/{name}")
        expected = values_of(model, optimizer)
        losses = train(model, optimizer, GONE_ON) if dist.get_world_size() == GOING_ON_FROM else None
        if dist.get_rank() == 0:
            torch.save((expected, losses), f"{folder}/{name}.pt")


@pytest.fixture(scope="module", params=WAYS)
def saved(request, world, tmp_path_factory):
    """What has saved, and by number of ranks, where they have."""
    folders = {}
    for num_ranks in WORLDS:
        folders[num_ranks] = str(tmp_path_factory.mktemp(f"of_{num_ranks}"))
        world(num_ranks).run(save_all, request.param, folders[num_ranks], timeout=240)
    return request.param, folders


def load_all(way, folders, turns):
    """Each has the values that were saved, and goes on with the losses of who saved."""
    _, load, families = WAYS[way]
    for family, turns_of in zip(families, turns, strict=True):
        kept = {name: (model := build(1), optimizer_of(model)) for name, build in family.items()}
        for saving, folder in folders.items():
            for turn in turns_of[saving]:
                for at, name in enumerate(family):
                    source = list(family)[(at + turn) % len(family)]
                    case = f"{source} on {saving} -> {name} on {dist.get_world_size()}"
                    expected, losses = torch.load(f"{folder}/{source}.pt", weights_only=False)
                    spoil(*kept[name])
                    load(*kept[name], f"{folder}/{source}")
                    assert_same(values_of(*kept[name]), expected, case)
                    if (saving, turn) == (GOING_ON_FROM, turns_of[saving][-1]):
                        assert_same(train(*kept[name], GONE_ON), losses, case, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_configuration_loads_what_every_one_has_saved_on_every_number_of_ranks(world, saved, num_ranks):
    way, folders = saved
    turns = [
        {saving: part(range(len(family)), len(WORLDS) * saving + num_ranks, len(family)) for saving in WORLDS}
        for family in WAYS[way][2]
    ]
    world(num_ranks).run(load_all, way, folders, turns, timeout=240)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_processes()
def test_the_files_hold_the_plain_models_values(tmp_path):
    expected = {f"model/{name}": each.clone() for name, each in built(0).state_dict().items()}
    for at, name in enumerate(("rows", "flat", "hsdp rows")):
        with Opened(place_of(sherd.save(tmp_path, {"model": ONE_MODEL[name](0)}, step=at))) as found:
            assert_same({key: read_tensor(found, key) for key in expected}, expected, name)
