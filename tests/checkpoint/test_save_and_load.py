"""What `sherd.save` has written in one configuration on some ranks, `sherd.load` reads in every other one.

One folder per configuration and number of saving ranks. A loading rank keeps one model per configuration and turns
them: in turn t, number i loads what number i + t has saved.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import FullyShardedDataParallel as FSDP
from sherd import MixedPrecision
from sherd.wrap import ModuleWrapPolicy
from tests.checkpoint.layouts import LAYOUTS, Odd, built, model_in, optimizer_of, train
from tests.support.suites import part

SAVED, GONE_ON = range(1), range(1, 2)
WORLDS = (1, 2, 3, 4)
GOING_ON_FROM = 3


def wrapped(use_orig_params, seed):
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


def replicated(seed):
    """HSDP on an even number of ranks."""
    size = dist.get_world_size()
    outer = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (outer, size // outer), mesh_dim_names=("replicate", "shard"))
    return model_in("rows", seed, mesh=mesh)


BUILD = {
    **{layout: lambda seed, layout=layout: model_in(layout, seed) for layout in LAYOUTS},
    "wrapper": lambda seed: wrapped(True, seed),
    "wrapper flat": lambda seed: wrapped(False, seed),
    "hsdp": replicated,
}
"""By name, a model in one configuration. Those of the wrapper have another dtype, and load from each other alone."""

FAMILIES = ([*LAYOUTS, "hsdp"], ["wrapper", "wrapper flat"])
"""Configurations of one model."""


def items(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def whole(model, optimizer):
    """All values by name, gathered in another way than a checkpoint is written."""
    with sherd.unsharded(model, writeback=False):
        values = {name: each.detach().clone() for name, each in named(model)}
    values |= {name: each.clone() for name, each in model.named_buffers()}
    return values, FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def named(model):
    for name, parameter in model.named_parameters(remove_duplicate=False):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        yield name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""), full


def differences(found, expected, where):
    if isinstance(expected, dict):
        if list(found) != list(expected) and set(found) != set(expected):
            return [f"{where}: names {sorted(set(map(str, found)) ^ set(map(str, expected)))}"]
        return [line for key, value in expected.items() for line in differences(found[key], value, f"{where}/{key}")]
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=True)
        return [line for at, pair in enumerate(pairs) for line in differences(*pair, f"{where}/{at}")]
    if not isinstance(expected, torch.Tensor):
        return [] if found == expected else [f"{where}: {found!r} is not {expected!r}"]
    same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    return [] if same else [f"{where}: {found} is not {expected}"]


def save_all(folder):
    for name, build in BUILD.items():
        model = build(0)
        optimizer = optimizer_of(model)
        train(model, optimizer, SAVED)
        path = sherd.save(f"{folder}/{name}", items(model, optimizer), step=7, per_rank={"rank": dist.get_rank()})
        assert path.endswith("step-00000007")
        losses = train(model, optimizer, GONE_ON) if dist.get_world_size() == GOING_ON_FROM else None
        restored = BUILD[name](1)
        optimizer = optimizer_of(restored)
        sherd.load(f"{folder}/{name}", items(restored, optimizer))
        expected = whole(restored, optimizer)
        if dist.get_rank() == 0:
            torch.save((expected, losses), f"{folder}/{name}.pt")


@pytest.fixture(scope="module")
def folders(world, tmp_path_factory):
    """By number of ranks, where they have saved."""
    made = {}
    for num_ranks in WORLDS:
        made[num_ranks] = str(tmp_path_factory.mktemp(f"of_{num_ranks}"))
        world(num_ranks).run(save_all, made[num_ranks], timeout=240)
    return made


def load_all(folders, turns):
    """What differs from what was saved, and the losses of the steps after it that are not those of who saved."""
    wrong = []
    for family, turns_of in zip(FAMILIES, turns, strict=True):
        kept = {name: BUILD[name](1) for name in family}
        kept = {name: (model, optimizer_of(model)) for name, model in kept.items()}
        for saving, folder in folders.items():
            for turn in turns_of[saving]:
                for at, name in enumerate(family):
                    saved = family[(at + turn) % len(family)]
                    case = f"{saved} on {saving} -> {name} on {dist.get_world_size()}"
                    expected, losses = torch.load(f"{folder}/{saved}.pt", weights_only=False)
                    restored = sherd.load(f"{folder}/{saved}", items(*kept[name]))
                    same = saving == dist.get_world_size()
                    wrong += differences(restored.per_rank, {"rank": dist.get_rank()} if same else {}, case)
                    wrong += differences(whole(*kept[name]), expected, case)
                    if (saving, turn) == (GOING_ON_FROM, turns_of[saving][-1]):
                        found = torch.tensor(train(*kept[name], GONE_ON))
                        if not torch.allclose(found, torch.tensor(losses), rtol=1e-4):
                            wrong.append(f"{case}: losses {found.tolist()} are not {losses}")
    return wrong


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_configuration_loads_what_every_one_has_saved_on_every_number_of_ranks(world, folders, num_ranks):
    # Two numbers of ranks meet in some turns, and each meets with one of the others in each turn.
    turns = [
        {saving: part(range(len(family)), saving + num_ranks, len(family) // 2) for saving in WORLDS}
        for family in FAMILIES
    ]
    assert world(num_ranks).run(load_all, folders, turns, timeout=240) == [[]] * num_ranks


def plain_values(folder):
    """Is what is in the file what the plain model has?"""
    from sherd.checkpoint.tensor_bytes import read_tensor
    from sherd.storage.opened import Opened
    from sherd.storage.places import place_of

    model = built(0)
    expected = {f"model/{name}": each.clone() for name, each in model.state_dict().items()}
    for at, build in enumerate((lambda: model_in("rows"), lambda: model_in("flat"), lambda: replicated(0))):
        with Opened(place_of(sherd.save(folder, {"model": build()}, step=at))) as found:
            assert differences({name: read_tensor(found, name) for name in expected}, expected, "") == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_files_hold_the_plain_models_values(world, tmp_path, num_ranks):
    world(num_ranks).run(plain_values, str(tmp_path))
