"""What one module computes with parameters of its own: `(rows, width)` in, the same shape out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.float64
NUM_TOKENS = 5


class Moment:
    """Where training is: what may decide what a module does."""

    def __init__(self) -> None:
        self.step = 0
        self.rank = 0
        self.leaves_garbage = False
        self.tokens = torch.zeros(0, dtype=torch.long)


class Stashing(torch.autograd.Function):
    """Keeps its operands as attributes, where saved-tensor hooks do not see them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


def _views(core: Core, x: Tensor) -> Tensor:
    query, key, value = core.first.chunk(3)
    square = core.flat.view(core.width, core.width)
    mixed = torch.sigmoid(x @ query.t()) * (x @ key.detach().t()) + torch.mm(value, x.t()).t()
    return torch.tanh(mixed @ square / core.width) * square[1]


def _complex(core: Core, x: Tensor) -> Tensor:
    y = x.to(torch.complex128) @ core.first
    return torch.tanh(y.real * core.second + y.imag)


def _buffers(core: Core, x: Tensor) -> Tensor:
    y = torch.tanh((x - core.running) @ core.first)
    if core.training:
        with torch.no_grad():
            core.running = core.running.lerp(x.mean(0), 0.1)
    return y


Shapes = dict[str, tuple[int, ...]]
KINDS: dict[str, tuple[Callable[[int], Shapes], Callable[[Core, Tensor], Tensor]]] = {
    "linear": (
        lambda w: {"first": (w, w), "bias": (w,)},
        lambda core, x: torch.tanh(F.linear(x, core.first, core.bias)),
    ),
    "lowrank": (
        lambda w: {"first": (3, w), "second": (w, 3)},
        lambda core, x: F.gelu(x @ core.first.t()) @ core.second.t(),
    ),
    "views": (lambda w: {"first": (3 * w, w), "flat": (w * w,)}, _views),
    "norm": (
        lambda w: {"first": (w,), "bias": (w,)},
        lambda core, x: F.layer_norm(x, (core.width,), core.first, core.bias, eps=1e-2),
    ),
    "scalar": (lambda w: {"first": (), "vector": (w,)}, lambda core, x: torch.sin(x * core.first) * core.vector),
    "empty": (
        lambda w: {"first": (w, w), "none": (0, w)},
        lambda core, x: torch.tanh(x @ core.first) + core.none.sum(),
    ),
    "embedding": (
        lambda w: {"first": (NUM_TOKENS, w)},
        lambda core, x: torch.tanh(x) * F.embedding(core.moment.tokens, core.first),
    ),
    "complex": (lambda w: {"first": (w, w), "second": (w,)}, _complex),
    "integers": (lambda w: {"first": (w, w)}, lambda core, x: torch.tanh(x[:, core.order] @ core.first)),
    "single": (
        lambda w: {"first": (w, w), "low": (3, w)},
        lambda core, x: torch.tanh(x @ core.first) * core.low.sum(0).to(x.dtype),
    ),
    "buffers": (lambda w: {"first": (w, w)}, _buffers),
    "experts": (
        lambda w: {"first": (w, w), "other": (w, w)},
        lambda core, x: torch.tanh(x @ (core.first if core.moment.step % 2 else core.other)),
    ),
    "stash": (lambda w: {"first": (w, w)}, lambda core, x: torch.tanh(Stashing.apply(x, core.first))),
    "vmap": (
        lambda w: {"first": (w, w), "bias": (w,)},
        lambda core, x: torch.vmap(lambda row: torch.tanh(core.first @ row + core.bias))(x),
    ),
    "nothing": (lambda w: {}, lambda core, x: torch.tanh(x)),
    "parameter": (lambda w: {"first": (1, w)}, lambda core, x: core.first),
    "slice": (lambda w: {"first": (8, w)}, lambda core, x: core.first[1 : 1 + len(x)]),
}
"""The shapes of the parameters of each kind, in a model of some width, and what is computed with them."""
DTYPES = {("complex", "first"): torch.complex128, ("single", "low"): torch.float32}


class Core(nn.Module):
    """One kind of parameters, and what is computed with them; `first` is what may be tied."""

    def __init__(self, kind: str, width: int, noise: torch.Generator, moment: Moment, divergent: str) -> None:
        super().__init__()
        self.kind, self.width, self.moment, self.divergent = kind, width, moment, divergent
        shapes = dict(KINDS[kind][0](width))
        if divergent == "some":
            shapes |= {"mine": (2, width), "theirs": (2, width)}
        for name, shape in shapes.items():
            scale = 1 / math.sqrt(shape[-1]) if shape and shape[-1] else 1.0
            values = torch.randn(shape, generator=noise, dtype=DTYPE).to(DTYPES.get((kind, name), DTYPE))
            self.register_parameter(name, nn.Parameter(values * scale))
        if kind == "integers":
            self.order = nn.Parameter(torch.randperm(width, generator=noise), requires_grad=False)
        if kind == "buffers":
            self.register_buffer("running", torch.zeros(width, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        if self.moment.leaves_garbage and self.moment.rank % 2 == 0:
            garbage: list[Any] = [each.view_as(each) for each in self.parameters()]
            garbage.append(garbage)
        if self.divergent == "none" and self.moment.rank % 2:
            return torch.tanh(x)
        y = KINDS[self.kind][1](self, x)
        if self.divergent == "some":
            own = self.mine if (self.moment.rank + self.moment.step) % 2 else self.theirs
            y = y * own.sum(0).sigmoid()
        return y
