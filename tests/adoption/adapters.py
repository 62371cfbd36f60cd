"""How is a model changed in these tests, and what is it compared with? Adapters go around linear layers, as in LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd import FullyShardedDataParallel, fully_shard
from sherd.errors import SherdError
from tests.support.comparing import Named, assert_named_close, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import WIDTH, noise


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


def shards(model: nn.Sequential, front_end: str = "fully_shard", **options: Any) -> Any:
    """`model` in three units: blocks and the rest. Options are `fully_shard`'s; wrappers have the parameters' own
    names."""
    if front_end == "wrapper":
        for at in range(2):
            model[at] = FullyShardedDataParallel(model[at], use_orig_params=True, **options)
        return FullyShardedDataParallel(model, use_orig_params=True, **options)
    mesh = mesh_of(options.pop("mesh_shape", None))
    for block in (model[0], model[1], model):
        fully_shard(block, mesh=mesh, **options)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, num: int = 3) -> None:
    """Train on this rank's batches, or in one process on those of all ranks of `plain_ranks`."""
    for step in range(first, first + num):
        model(noise(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int, first: int = 0, num: int = 3
) -> None:
    """What `steps` does on `num_ranks` ranks, in one process."""
    for step in range(first, first + num):
        for rank in range(num_ranks):
            (model(noise(step, rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(found: list[Named], expected: nn.Module) -> None:
    """Every rank has the parameters of the plain model."""
    for params in found:
        assert_named_close(params, whole_params(expected), "parameter", 1e-5, 1e-6)


def text_of(action: Callable[[], object], kind: type[SherdError]) -> str:
    """The text of the error of `kind` that `action` raises."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
