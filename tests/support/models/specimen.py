"""Tiny models that know their inputs, their loss and their units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

BATCH = 4
WIDTH = 8
VOCABULARY = 11

Unit = nn.Module | list[nn.Module]


class Specimen(nn.Module):
    """A tiny model with its inputs, its loss and its units."""

    # What `sharded` gives to every unit as `shard_placement_fn`; None: the default, dim 0.
    placement: Callable[[nn.Parameter], Shard | None] | None = None

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        """The positional arguments of forward for one rank's batch in one step."""
        return (noise(seed, rank),)

    def units(self) -> list[Unit]:
        """What to shard, bottom up: blocks or layers, or else all children, and then the model."""
        inner = getattr(self, "blocks", None) or getattr(self, "layers", None) or self.children()
        return [*inner, self]

    def loss(self, output: Any) -> Tensor:
        """A scalar; every element of the output pulls on it."""
        return (output.float() - 0.5).square().mean()


class Layers(Specimen):
    """Layers in a row, each a unit."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, type[Specimen]] = {}


def specimen(cls: type[Specimen]) -> type[Specimen]:
    """Enter `cls` in MODELS: class TiedAcross is "tied_across"."""
    name = "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("_")
    MODELS[name] = cls
    return cls


def build(name: str, seed: int = 0, device: str = "cpu") -> Specimen:
    """The model called `name`, with the same weights on every rank; on "meta", without any."""
    with torch.device(device):
        torch.manual_seed(seed)
        return MODELS[name]()


def generator(seed: int, rank: int) -> torch.Generator:
    """A stream of numbers of its own for each seed and rank."""
    return torch.Generator().manual_seed(7919 * seed + rank + 1)


def noise(seed: int, rank: int, *shape: int) -> Tensor:
    """Normal float32 noise, (BATCH, WIDTH) unless a shape is given."""
    return torch.randn(shape or (BATCH, WIDTH), generator=generator(seed, rank))


def tokens(seed: int, rank: int, length: int = 6) -> Tensor:
    """Token numbers, int64, (BATCH, length)."""
    return torch.randint(VOCABULARY, (BATCH, length), generator=generator(seed, rank))


class Block(nn.Module):
    """The ordinary unit: a residual two-layer perceptron."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))
