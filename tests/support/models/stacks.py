"""Stacks of units, and who owns which parameter: tied, frozen, nested, branching, partly used, listed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.specimen import VOCABULARY, WIDTH, Block, Layers, Specimen, Unit, noise, specimen, tokens


@specimen
class Mlp(Specimen):
    """Nothing difficult: a stack of blocks, and parameters of the root's own."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@specimen
class WholeInOneUnit(Mlp):
    """One unit for everything."""

    def units(self) -> list[Unit]:
        return [self]


@specimen
class TiedInside(Specimen):
    """The head is the embedding, both in the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (tokens(seed, rank),)

    def units(self) -> list[Unit]:
        return [self.block, self]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


@specimen
class TiedAcross(TiedInside):
    """The head is the embedding, each in a unit of its own."""

    def units(self) -> list[Unit]:
        return [self.embed, self.block, self.head, self]


@specimen
class TiedToRoot(TiedInside):
    """The head is a unit, the embedding it shares its weight with belongs to the root."""

    def units(self) -> list[Unit]:
        return [self.block, self.head, self]


@specimen
class SharedModule(Specimen):
    """One module under two names, a unit, run twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.once = Block()
        self.again = self.once
        self.last = nn.Linear(WIDTH, WIDTH)

    def units(self) -> list[Unit]:
        return [self.once, self]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.once(x))))


@specimen
class Frozen(Mlp):
    """The first and the middle blocks, units of their own, need no gradient."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        for part in (self.first, self.blocks[0], self.blocks[2]):
            part.requires_grad_(False)


class LowRank(nn.Module):
    """A frozen weight (WIDTH, WIDTH) and its trained correction of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


@specimen
class Adapted(Layers):
    """Frozen and trained parameters in one unit."""

    def __init__(self) -> None:
        super().__init__(*(LowRank() for _ in range(3)))


class Storey(nn.Module):
    """Uses parameters of its own before and after the module inside it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = inside
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inside(torch.tanh(self.before(x))))


@specimen
class Nested(Specimen):
    """Units within units within units."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Storey(Storey(Storey(Block())))

    def units(self) -> list[Unit]:
        return [m for m in reversed(list(self.modules())) if isinstance(m, (Storey, Block, Nested))]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


@specimen
class Branching(Specimen):
    """Each step takes one of three branches, each a unit; two of them get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(Block() for _ in range(3))

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (noise(seed, rank), (0, 2, 0, 1, 2)[seed % 5])

    def units(self) -> list[Unit]:
        return [*self.branches, self]

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.stem(x))


class PartlyUsed(Block):
    """A block with one parameter that its forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


@specimen
class Unused(Specimen):
    """A parameter nobody uses, and a unit nobody runs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = PartlyUsed()
        self.idle = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@specimen
class ListUnit(Specimen):
    """Two modules that make one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def units(self) -> list[Unit]:
        return [self.block, [self.norm, self.head], self]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x)))


class Layer(nn.Module):
    """A decoder layer: causal attention with two heads, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        split = partial(torch.unflatten, dim=-1, sizes=(2, WIDTH // 2))
        query, key, value = (split(t).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.block(x + self.out(mixed.transpose(1, 2).flatten(2)))


@specimen
class Transformer(Specimen):
    """All of it at once: token inputs, attention, a loss made by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def make_inputs(self, seed: int, rank: int) -> tuple[Any, ...]:
        return (tokens(seed, rank),)

    def units(self) -> list[Unit]:
        return [*self.layers, [self.norm, self.head], self]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    def loss(self, output: Tensor) -> Tensor:
        return output
