"""Float32 masters of bfloat16 parameters in checkpoints: a run goes on as one in float32, to the bit."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import sherd
from sherd import Blocks, Disk, Flat, MixedPrecisionPolicy, OffloadPolicy, Owned, fully_shard
from sherd import FullyShardedDataParallel as FSDP
from sherd.checkpoint.encoding import read_tensor
from sherd.cli.main import main
from sherd.storage.files import Opened
from sherd.storage.places import place_of
from tests.support.comparing import whole
from tests.support.meshes import mesh_of
from tests.support.models import chain, noise
from tests.support.ranks.bodies import on_processes, on_threads

WIDTH = 12
MASTERS = OffloadPolicy(masters="device")
PLACEMENTS: dict[str, Any] = {"rows": None, "flat": Flat(), "blocks": Blocks(2), "whole": Owned()}
LAYOUTS = (*PLACEMENTS, "replicas", "wrapper", "flat wrapper")
"""Of models with masters; "plain" is one with float32 parameters."""


def model_in(layout: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = chain(2, WIDTH).append(nn.Linear(WIDTH, 5)).to(torch.bfloat16)
    precision: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if "wrapper" in layout:
        options = {"mixed_precision": sherd.MixedPrecision(**precision), "cpu_offload": MASTERS}
        return FSDP(model, use_orig_params=layout == "wrapper", device_id=torch.device("cpu"), **options)
    options = {"offload_policy": MASTERS, "placement": PLACEMENTS.get(layout)}
    if layout == "disk":
        disk = Disk(tempfile.gettempdir())
        options["offload_policy"] = OffloadPolicy(optimizer=disk, masters=disk)
    if layout in ("plain", "bfloat16"):
        model, options = model.to(torch.float32 if layout == "plain" else torch.bfloat16), {}
    if layout == "replicas":
        size = dist.get_world_size()
        options["mesh"] = mesh_of((2, size // 2) if size % 2 == 0 else (1, size))
    for unit in (*model[:2], model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(**precision), **options)
    return model


def optimizer_of(model: nn.Module, kind: Any, flattens: bool = False) -> Any:
    if kind is sherd.Muon:
        return sherd.Muon(model, lr=1e-2)
    optimizer = kind(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is optim.SGD else {}))
    return sherd.flatten_optimizer(optimizer) if flattens else optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Trains on batches that are the same on all ranks."""
    for step in steps:
        model(noise(step, 0, 4, WIDTH).to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(folder: str, layout: str, *how: Any, steps: int = 3, more: int = 3) -> None:
    """Trains some steps, saves, and trains and saves on."""
    model = model_in(layout)
    optimizer = optimizer_of(model, *how)
    items = {"model": model, "optimizer": optimizer}
    train(model, optimizer, range(steps))
    sherd.save(folder, items, step=steps)
    train(model, optimizer, range(steps, steps + more))
    sherd.save(folder, items, step=steps + more)


def gone_on(folder: str, into: str, layout: str, *how: Any, steps: int = 3, more: int = 3) -> None:
    """Goes on from what `begun` has saved, with other weights before, and saves again."""
    model = model_in(layout, seed=1)
    optimizer = optimizer_of(model, *how)
    items = {"model": model, "optimizer": optimizer}
    train(model, optimizer, range(90, 91))
    sherd.load(folder, items, step=steps)
    sherd.save(into, items, step=steps)
    train(model, optimizer, range(steps, steps + more))
    sherd.save(into, items, step=steps + more)


def stored(folder: object, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, unsharded."""
    with Opened(place_of(f"{folder}/step-{step:08}")) as source:
        return {name: read_tensor(source, name) for name in source.manifest.tensors if "random" not in name}


def assert_equal(one: object, other: object, step: int) -> None:
    first, second = stored(one, step), stored(other, step)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype is torch.float32, name
        assert torch.equal(value, second[name]), (name, step)


KINDS = [(optim.AdamW,), (optim.AdamW, True), (optim.SGD,)]


@pytest.mark.parametrize("how", KINDS)
def test_a_run_goes_on_as_one_in_float32_on_any_ranks_and_back(threads, tmp_path, how):
    """Of optimizers that are the same element by element: with other ranks matrices are multiplied in other batches."""
    threads(2).run(begun, str(tmp_path / "plain"), "plain", *how)
    for at, layout in enumerate(LAYOUTS):
        ours = tmp_path / layout
        threads(2).run(begun, str(ours), layout, *how)
        assert_equal(tmp_path / "plain", ours, 3)
        assert_equal(tmp_path / "plain", ours, 6)
        for num_ranks, other in ((4, LAYOUTS[at - 1]), (1, layout), (2, "plain")):
            into = tmp_path / f"{layout} to {other}"
            threads(num_ranks).run(gone_on, str(ours), str(into), other, *how)
            assert_equal(ours, into, 3)
            assert_equal(ours, into, 6)
        into = tmp_path / f"plain to {layout}"
        threads(2).run(gone_on, str(tmp_path / "plain"), str(into), layout, *how)
        assert_equal(ours, into, 6)


@pytest.mark.parametrize("layout", ["rows", "whole", "flat wrapper"])
def test_muon_goes_on_as_in_float32(threads, tmp_path, layout):
    for each in (layout, "plain"):
        threads(2).run(begun, str(tmp_path / each), each, sherd.Muon)
    for one, other in ((layout, layout), (layout, "plain"), ("plain", layout)):
        into = tmp_path / f"{one} to {other}"
        threads(2).run(gone_on, str(tmp_path / one), str(into), other, sherd.Muon)
        assert_equal(tmp_path / one, into, 3)
        assert_equal(tmp_path / one, into, 6)


@pytest.mark.parametrize("how", KINDS)
def test_a_run_goes_on_from_a_disk_and_on_one(world, tmp_path, how):
    for layout in ("disk", "rows"):
        world(2).run(begun, str(tmp_path / layout), layout, *how)
    for one, other in (("disk", "disk"), ("disk", "rows"), ("rows", "disk")):
        into = tmp_path / f"{one} to {other}"
        world(2).run(gone_on, str(tmp_path / one), str(into), other, *how)
        for step in (3, 6):
            assert_equal(tmp_path / "rows", into, step)


@on_processes(2)
def test_moments_stay_float32_however_they_come():
    for layout, kind in itertools.product(("rows", "flat", "flat wrapper"), (optim.AdamW, sherd.Muon)):
        model = model_in(layout)
        optimizer = optimizer_of(model, kind)
        train(model, optimizer, range(3))
        for way, chosen in WAYS.items():
            options = StateDictOptions(**chosen)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            is_empty = "rank0" in way and dist.get_rank()
            other = model_in(layout, seed=1)
            its = optimizer_of(other, kind)
            set_optimizer_state_dict(other, its, {} if is_empty else state, options=options)
            assert_same_state(optimizer, its, f"{layout}, {kind.__name__}, {way}")
        if layout == "flat wrapper":
            state = FSDP.optim_state_dict(model, optimizer)
            other = model_in(layout, seed=1)
            its = optimizer_of(other, kind)
            its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state))
            assert_same_state(optimizer, its, f"{layout}, {kind.__name__}, FSDP1")


WAYS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "full from rank0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def assert_same_state(one: Any, other: Any, where: str) -> None:
    pairs = zip(*([each for group in of.param_groups for each in group["params"]] for of in (one, other)), strict=True)
    for first, second in pairs:
        expected, found = one.state[first], other.state[second]
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            assert value.dtype is found[key].dtype is torch.float32, (where, key)
            assert torch.equal(whole(value), whole(found[key])), (where, key)


@on_processes(2)
def test_files_of_either_dtype_load_into_models_of_either(tmp_path):
    """A file in float32 sets weights and low bits, one in bfloat16 makes the weights the masters."""
    trained = model_in("rows")
    train(trained, optimizer_of(trained, optim.AdamW), range(3))
    sherd.async_save(tmp_path / "float32", {"model": trained}, step=1).wait()
    masters = stored(tmp_path / "float32", 1)
    assert all(each.dtype is torch.float32 for each in masters.values())
    half = model_in("bfloat16")
    sherd.load(tmp_path / "float32", {"model": half})
    sherd.save(tmp_path / "bfloat16", {"model": half}, step=1)
    weights = stored(tmp_path / "bfloat16", 1)
    for name, weight in weights.items():
        assert weight.dtype is torch.bfloat16
        assert torch.equal(weight, masters[name].to(torch.bfloat16))
        assert not torch.equal(weight.float(), masters[name])
    for layout in ("flat", "flat wrapper"):
        model = model_in(layout, seed=1)
        train(model, optimizer_of(model, optim.AdamW), range(3))
        for step, expected in ((1, masters), (2, weights)):
            sherd.load(tmp_path / ("float32" if step == 1 else "bfloat16"), {"model": model})
            sherd.save(tmp_path / layout, {"model": model}, step=step)
            found = stored(tmp_path / layout, step)
            assert all(torch.equal(each.float(), found[name]) for name, each in expected.items())


@on_threads(1)
def test_inspect_says_float32(tmp_path, capsys):
    sherd.save(tmp_path, {"model": model_in("rows")}, step=1)
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "float32" in said or "F32" in said
    assert "bfloat16" not in said
    assert "BF16" not in said
