"""Parameters of unusual shape, dtype or memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.support.models.specimen import BATCH, WIDTH, Block, Layers, Specimen, Unit, noise, specimen
from tests.support.models.stacks import Mlp


class TwoDtypes(nn.Module):
    """One linear layer in float32, one in another dtype."""

    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, dtype=other)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(torch.tanh(self.plain(x)).to(self.other.weight.dtype)).to(x.dtype)


class MixedDtype(Layers):
    """Two dtypes in one unit."""

    other: torch.dtype

    def __init__(self) -> None:
        super().__init__(TwoDtypes(self.other), TwoDtypes(self.other))


@specimen
class MixedDouble(MixedDtype):
    """float32 and float64: no rounding to hide behind."""

    other = torch.float64


@specimen
class MixedBfloat(MixedDtype):
    """float32 and bfloat16."""

    other = torch.bfloat16


class Gained(Block):
    """A block whose result is scaled by a 0-dimensional parameter."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@specimen
class ScalarParameter(Specimen):
    """0-dimensional parameters, in a unit beside others and alone in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Gained()
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + torch.tanh(self.shift)


@specimen
class TinyParameter(Specimen):
    """Parameters of one element: all ranks but one hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(WIDTH, 1)
        self.only = nn.Linear(1, 1)
        self.widen = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(torch.tanh(self.only(self.squeeze(x))))


@specimen
class Uneven(Layers):
    """Sizes 7, 5 and 3: shards of different sizes, some of them empty."""

    def __init__(self) -> None:
        super().__init__(Block(7, 5), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False))

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (noise(seed, rank, BATCH, 7),)


def last_dim(param: nn.Parameter) -> Shard | None:
    """Cut matrices by columns."""
    return Shard(param.ndim - 1) if param.ndim > 1 else None


@specimen
class UnevenColumns(Uneven):
    """As Uneven, with matrices cut on dim 1."""

    placement = staticmethod(last_dim)


@specimen
class Columns(Mlp):
    """Matrices cut on dim 1, which divides by 2 and 4 ranks."""

    placement = staticmethod(last_dim)


@specimen
class NonContiguous(Specimen):
    """A transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.up.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@specimen
class Buffers(Specimen):
    """Buffers, of floats and of whole numbers, are nobody's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3))

    def units(self) -> list[Unit]:
        return [self.layers, self]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale
