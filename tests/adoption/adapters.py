"""How a model is changed in these tests, and how it is trained. Adapters go around linear layers, as in LoRA."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd import CPUOffloadPolicy
from tests.support.comparing import assert_named_close, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import WIDTH, noise
from tests.support.sharding import sharded

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"front": "flat"}),
    (3, {"front": "blocks"}),
    (2, {"front": "owned"}),
    (4, {"mesh_shape": (2, 2)}),
    (4, {"mesh_shape": (2, 2), "front": "flat", "placements": "hfsdp"}),
    (4, {"placements": "zero1"}),
    (2, {"placements": "zero2"}),
    (2, {"placements": "ddp"}),
    (2, {"offload_policy": CPUOffloadPolicy()}),
    (2, {"front": "wrapper"}),
]
"""How many ranks, and the options of `shards`: those under which a parameter keeps its name."""


class Adapter(nn.Module):
    """A linear layer with a low-rank update beside it (Hu et al., 2021), under the names that PEFT gives."""

    def __init__(self, base_layer: nn.Module, seed: int = 0, rank: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, WIDTH, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Tied(nn.Module):
    """Two layers whose weights may be tied, and a method that uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def tie_weights(self) -> Tied:
        self.head.weight = self.embed.weight
        return self

    def encode(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x).relu())


def net() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def adapt(model: Any, seed: int = 7, freeze: bool = True) -> Any:
    """Freeze all, and put adapters into the first block and around the head."""
    model.requires_grad_(not freeze)
    for at, parent in enumerate((inner(model)[0], model)):
        inner(parent)[2] = Adapter(inner(parent)[2], seed + at)
    return model


def inner(module: Any) -> Any:
    """The module in a wrapper; any other as it is."""
    return getattr(module, "module", module)


def shards(
    model: nn.Sequential, front: str = "shard", mesh_shape: tuple[int, ...] | None = None, **options: Any
) -> Any:
    """`model` in three units: blocks and the rest."""
    if mesh_shape is not None:
        options["mesh"] = mesh_of(mesh_shape)
    return sharded(model, front, [model[0], model[1], model], **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, num: int = 3, of_all: bool = False
) -> None:
    """On a rank: train on its own batches, or a plain model on those of all ranks in turn."""
    ranks = range(dist.get_world_size()) if of_all else [dist.get_rank()]
    for step in range(first, first + num):
        for rank in ranks:
            (model(noise(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    assert_named_close(whole_params(model), whole_params(plain), "parameter", 1e-5, 1e-6)
