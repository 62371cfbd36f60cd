"""Moves of checkpoints between random configurations: saved in one, loaded in another and saved again, and compared.

`SHERD_MOVES=500 pytest tests/checkpoint/test_random_moves.py` tries as many as that says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd import CPUOffloadPolicy, FullyShardedDataParallel
from sherd.checkpoint.encoding import read_tensor
from sherd.policy import Level
from sherd.storage.files import Opened
from sherd.storage.places import place_of
from sherd.wrap import ModuleWrapPolicy
from tests.checkpoint.layouts import Odd, Stack
from tests.strategies.cases import CUTS, of_parameter, placements
from tests.support.comparing import assert_same, plain_name
from tests.support.meshes import mesh_of
from tests.support.suites import share

NUM_MOVES = int(os.environ.get("SHERD_MOVES", share(10, 24)))
AT_A_TIME = 2
SHAPES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (4, 1)]}


class Whole(Odd):
    """An odd unit that trains as a whole, with a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed.requires_grad_()
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum()


@dataclass(frozen=True)
class Configuration:
    """How a model lies over `world` ranks, and what steps it."""

    world: int
    mesh: tuple[int, ...]
    front: str
    cut: str
    levels: tuple[Level, ...]
    offload: bool
    optimizer: str
    dtype: torch.dtype


@st.composite
def configurations(draw: Any, dtype: torch.dtype, optimizer: str) -> Configuration:
    world = draw(st.integers(1, 4))
    mesh = draw(st.sampled_from(SHAPES[world]))
    front = draw(st.sampled_from(["plain", "fully_shard", "wrapper", "flat wrapper"]))
    cut = "flat" if "wrapper" in front else draw(st.sampled_from(sorted(CUTS)))
    levels = tuple(draw(st.sampled_from(list(Level))) for _ in mesh)
    # A flat parameter needs an axis to lie on.
    assume(front != "flat wrapper" or len(mesh) == 1 or any(level is not Level.COPIES for level in levels))
    offload = front == "fully_shard" and draw(st.booleans()) and levels[-1] is Level.PARAMETERS
    return Configuration(world, mesh, front, cut, levels, offload, optimizer, dtype)


def made(of: Configuration, number: int) -> tuple[Any, Any]:
    torch.manual_seed(number)
    model: Any = Stack(Whole(), Whole()).to(of.dtype)
    options: dict[str, Any] = {"placements": placements(of.levels, of.cut)} if of.front == "fully_shard" else {}
    if of.cut == "columns":
        options["shard_placement_fn"] = of_parameter(of.cut)
    if of.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if of.front == "fully_shard":
        mesh = mesh_of(of.mesh)
        for unit in (*model.blocks, model):
            sherd.fully_shard(unit, mesh=mesh, **options)
    elif of.front != "plain":
        model = FullyShardedDataParallel(
            model,
            device_mesh=mesh_of(of.mesh),
            sharding_strategy=placements(of.levels, of.cut),
            auto_wrap_policy=ModuleWrapPolicy({Whole}),
            use_orig_params=of.front == "wrapper",
        )
    parameters = list(model.parameters())
    if of.optimizer == "adamw":
        return model, torch.optim.AdamW(parameters, lr=0.05, eps=1e-2)
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
    return model, torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)


def stepped(model: Any, optimizer: Any) -> None:
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(of: Configuration, folder: str) -> None:
    model, optimizer = made(of, 0)
    stepped(model, optimizer)
    sherd.save(folder, {"model": model, "optimizer": optimizer}, step=1, random=False)
    with sherd.unsharded(model, writeback=False), Opened(place_of(f"{folder}/step-00000001")) as found:
        for name, parameter in model.named_parameters():
            if "_flat_param" not in name:
                assert_same(read_tensor(found, f"model/{plain_name(name)}"), parameter.detach().cpu(), name)


def moved(of: Configuration, source: str, target: str, is_stepped: bool) -> None:
    model, optimizer = made(of, 1)
    if is_stepped:
        stepped(model, optimizer)
    sherd.load(source, {"model": model, "optimizer": optimizer})
    sherd.save(target, {"model": model, "optimizer": optimizer}, step=2, random=False)


def contents(folder: str) -> tuple[dict[str, Any], Any, Any]:
    """The tensors, and of the optimizer the states and the groups, with their parameters in order."""
    with Opened(place_of(folder)) as found:
        tensors = {name: read_tensor(found, name) for name in found.manifest.tensors}
        optimizer = found.manifest.values["optimizer"]
    groups = [{**group, "params": sorted(group["params"])} for group in optimizer["param_groups"]]
    return tensors, optimizer["state"], groups


@pytest.mark.front("Checkpoints that survive")
@pytest.mark.parametrize("turn", range(-(-NUM_MOVES // AT_A_TIME)))
def test_what_moves_from_one_random_configuration_to_another_is_the_same(world, tmp_path_factory, turn):
    @seed(turn)
    @settings(max_examples=AT_A_TIME, phases=[Phase.generate])
    @given(st.data())
    def move(data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        optimizer = data.draw(st.sampled_from(["adamw", "sgd"]))
        one, other = (data.draw(configurations(dtype, optimizer)) for _ in range(2))
        folder = tmp_path_factory.mktemp("move")
        world(one.world).run(saved, one, str(folder / "one"))
        world(other.world).run(moved, other, str(folder / "one"), str(folder / "other"), data.draw(st.booleans()))
        assert_same(contents(f"{folder}/other/step-00000002"), contents(f"{folder}/one/step-00000001"))

    move()
