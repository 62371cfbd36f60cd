"""Moves of checkpoints between random configurations: saved in one, loaded in another and saved again, and compared.

`SHERD_MOVES=500 pytest tests/checkpoint/test_random_moves.py` tries as many as that says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import sherd
from sherd import CPUOffloadPolicy, FullyShardedDataParallel
from sherd.checkpoint.tensor_bytes import read_tensor
from sherd.policy import Level
from sherd.storage.opened import Opened
from sherd.storage.places import place_of
from sherd.wrap import ModuleWrapPolicy
from tests.strategies.cases import CUTS, of_parameter, placements
from tests.support.meshes import mesh_of
from tests.support.suites import share

USUAL_MOVES = share(10, 24)
NUM_MOVES = int(os.environ.get("SHERD_MOVES", USUAL_MOVES))
SHAPES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (4, 1)]}


class Odd(nn.Module):
    """Rows that do not divide, a scalar, one element, three dims, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.cube = nn.Parameter(torch.randn(3, 2, 7))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x) * self.gain + self.one) * self.cube.sum((0, 1))
        return x + hidden.sum(-1, keepdim=True) + self.none.sum()


class Net(nn.Module):
    """Odd units between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Odd(), Odd()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


def made(of: Configuration, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = Net().to(of.dtype)
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
            auto_wrap_policy=ModuleWrapPolicy({Odd}),
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
            name = name.replace("_checkpoint_wrapped_module.", "")
            if "_flat_param" not in name:
                assert torch.equal(read_tensor(found, f"model/{name}"), parameter.detach().cpu()), name


def moved(of: Configuration, source: str, target: str, is_stepped: bool) -> None:
    model, optimizer = made(of, 1)
    if is_stepped:
        stepped(model, optimizer)
    sherd.load(source, {"model": model, "optimizer": optimizer})
    sherd.save(target, {"model": model, "optimizer": optimizer}, step=2, random=False)


def contents(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with Opened(place_of(folder)) as found:
        return {name: read_tensor(found, name) for name in sorted(found.manifest.tensors)}, dict(found.manifest.values)


def same(found: Any, expected: Any) -> None:
    tensors, values = found
    assert list(tensors) == list(expected[0])
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[0][name].dtype, name
        assert torch.equal(tensor, expected[0][name]), name
    states = [each["optimizer"]["state"] for each in (values, expected[1])]
    assert states[0] == states[1]
    groups = [
        [{**group, "params": sorted(group["params"])} for group in each["optimizer"]["param_groups"]]
        for each in (values, expected[1])
    ]
    assert groups[0] == groups[1]


def test_what_moves_from_one_random_configuration_to_another_is_the_same(world, tmp_path_factory):
    number = iter(range(1 << 30))

    @settings(max_examples=NUM_MOVES, derandomize=NUM_MOVES == USUAL_MOVES, phases=[Phase.generate])
    @given(st.data())
    def move(data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        optimizer = data.draw(st.sampled_from(["adamw", "sgd"]))
        one, other = (data.draw(configurations(dtype, optimizer)) for _ in range(2))
        folder = tmp_path_factory.mktemp(f"move{next(number)}")
        world(one.world).run(saved, one, str(folder / "one"))
        world(other.world).run(moved, other, str(folder / "one"), str(folder / "other"), data.draw(st.booleans()))
        same(contents(f"{folder}/other/step-00000002"), contents(f"{folder}/one/step-00000001"))

    move()
