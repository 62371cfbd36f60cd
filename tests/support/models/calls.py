"""How a forward reads parameters and passes tensors on: views, repeats, containers, in-place changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.specimen import BATCH, VOCABULARY, WIDTH, Block, Layers, Specimen, noise, specimen, tokens


class SavesViews(nn.Module):
    """Autograd saves views of the weights, not the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 3)
        self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fused.chunk(3)
        mixed = torch.sigmoid(x @ query.t()) * (x @ key) + torch.mm(value, x.t()).t()
        square = self.flat.view(WIDTH, WIDTH)
        return x + torch.tanh(mixed @ square.t()) * square[1].expand_as(x) + F.linear(x, square.t())


@specimen
class ViewSaving(Layers):
    """Saved views must show the weights again after they were freed and gathered anew."""

    def __init__(self) -> None:
        super().__init__(SavesViews(), SavesViews())


@specimen
class SeveralForwards(Specimen):
    """One unit runs three times before its one backward, another unit between."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Block()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.between(self.cell(x)))
        return x


class Returns(nn.Module):
    """Holds a weight, and gives its input back, alone or beside a result."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x if self.alone else (x, self.weight(x))


@specimen
class Passthrough(Specimen):
    """Units that return their input unchanged, and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Returns(alone=True)
        self.block = Block()
        self.both = Returns(alone=False)
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        same, result = self.both(self.block(self.enter(x)))
        return self.nothing(same * result)


class ReturnsView(Block):
    """Its output is a view of what autograd made."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(BATCH, WIDTH)


@specimen
class ChangedInPlace(Specimen):
    """The caller changes a unit's output, a view, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ReturnsView()
        self.second = ReturnsView()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1
        x = self.second(x)
        x.mul_(0.5)
        return x


class Pair(NamedTuple):
    """Two tensors, one of them whole numbers."""

    left: Tensor
    counts: Tensor


class TakesContainers(nn.Module):
    """Nested containers in, by position and by name; nested containers out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair, *, rest: dict[str, list[Tensor]]) -> tuple[Pair, dict[str, list[Tensor]]]:
        # Of the size of one: larger gradients would cancel between ranks and leave their rounding behind.
        left = torch.tanh(self.left(pair.left)) * pair.counts / VOCABULARY
        right = [self.right(t) for t in rest["right"]]
        return Pair(left, pair.counts), {"right": right, "unused": [self.right(left)]}


@specimen
class Containers(Specimen):
    """Dictionaries, lists and named tuples go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TakesContainers()
        self.second = TakesContainers()

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (Pair(noise(seed, rank), tokens(seed, rank, WIDTH)), {"right": [noise(seed + 50, rank)]})

    def forward(self, pair: Pair, rest: dict[str, list[Tensor]]) -> dict[str, Any]:
        pair, rest = self.first(pair, rest=rest)
        pair, rest = self.second(pair, rest=rest)
        return {"pair": pair, "rest": (rest,)}

    def loss(self, output: dict[str, Any]) -> Tensor:
        return super().loss(output["pair"].left) + super().loss(output["rest"][0]["right"][0])


@dataclass
class Box:
    """A dataclass that torch's pytrees do not know."""

    hidden: Tensor
    label: str


class TakesBox(Block):
    """A dataclass in, a dataclass out."""

    def forward(self, box: Box) -> Box:  # type: ignore[override]
        return Box(super().forward(box.hidden), box.label + "+")


@specimen
class Dataclasses(Specimen):
    """Unregistered dataclasses go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TakesBox()
        self.second = TakesBox()

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (Box(noise(seed, rank), ""),)

    def forward(self, box: Box) -> Box:
        return self.second(self.first(box))

    def loss(self, output: Box) -> Tensor:
        assert output.label == "++"
        return super().loss(output.hidden)
