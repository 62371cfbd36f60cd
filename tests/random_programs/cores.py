"""What one module computes with parameters of its own: `(rows, width)` in, the same shape out."""

from __future__ import annotations

import math
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


class Core(nn.Module):
    """One kind of parameters, and what is computed with them; `first` is what may be tied."""

    def __init__(self, kind: str, width: int, noise: torch.Generator, moment: Moment, divergent: str) -> None:
        super().__init__()
        self.kind, self.width, self.moment, self.divergent = kind, width, moment, divergent
        self._noise = noise
        getattr(self, f"_make_{kind}")()
        if divergent == "some":
            self.mine = self._new(2, width)
            self.theirs = self._new(2, width)

    def _new(self, *shape: int, dtype: torch.dtype = DTYPE) -> nn.Parameter:
        scale = 1 / math.sqrt(shape[-1]) if shape and shape[-1] else 1.0
        return nn.Parameter(torch.randn(shape, generator=self._noise, dtype=DTYPE).to(dtype) * scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.moment.leaves_garbage and self.moment.rank % 2 == 0:
            garbage: list[Any] = [each.view_as(each) for each in self.parameters()]
            garbage.append(garbage)
        if self.divergent == "none" and self.moment.rank % 2:
            return torch.tanh(x)
        y = getattr(self, f"_do_{self.kind}")(x)
        if self.divergent == "some":
            own = self.mine if (self.moment.rank + self.moment.step) % 2 else self.theirs
            y = y * own.sum(0).sigmoid()
        return y

    # Kinds

    def _make_linear(self) -> None:
        self.first, self.bias = self._new(self.width, self.width), self._new(self.width)

    def _do_linear(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.first, self.bias))

    def _make_lowrank(self) -> None:
        self.first, self.second = self._new(3, self.width), self._new(self.width, 3)

    def _do_lowrank(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.first.t()) @ self.second.t()

    def _make_views(self) -> None:
        self.first, self.flat = self._new(3 * self.width, self.width), self._new(self.width * self.width)

    def _do_views(self, x: Tensor) -> Tensor:
        query, key, value = self.first.chunk(3)
        square = self.flat.view(self.width, self.width)
        mixed = torch.sigmoid(x @ query.t()) * (x @ key.detach().t()) + torch.mm(value, x.t()).t()
        return torch.tanh(mixed @ square / self.width) * square[1]

    def _make_norm(self) -> None:
        self.first, self.bias = self._new(self.width), self._new(self.width)

    def _do_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.first, self.bias, eps=1e-2)

    def _make_scalar(self) -> None:
        self.first, self.vector = self._new(), self._new(self.width)

    def _do_scalar(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.first) * self.vector

    def _make_empty(self) -> None:
        self.first, self.none = self._new(self.width, self.width), self._new(0, self.width)

    def _do_empty(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) + self.none.sum()

    def _make_embedding(self) -> None:
        self.first = self._new(NUM_TOKENS, self.width)

    def _do_embedding(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * F.embedding(self.moment.tokens, self.first)

    def _make_complex(self) -> None:
        self.first = self._new(self.width, self.width, dtype=torch.complex128)
        self.second = self._new(self.width)

    def _do_complex(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex128) @ self.first
        return torch.tanh(y.real * self.second + y.imag)

    def _make_integers(self) -> None:
        self.first = self._new(self.width, self.width)
        self.order = nn.Parameter(torch.randperm(self.width, generator=self._noise), requires_grad=False)

    def _do_integers(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, self.order] @ self.first)

    def _make_single(self) -> None:
        self.first, self.low = self._new(self.width, self.width), self._new(3, self.width, dtype=torch.float32)

    def _do_single(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) * self.low.sum(0).to(x.dtype)

    def _make_buffers(self) -> None:
        self.first = self._new(self.width, self.width)
        self.register_buffer("running", torch.zeros(self.width, dtype=DTYPE))

    def _do_buffers(self, x: Tensor) -> Tensor:
        y = torch.tanh((x - self.running) @ self.first)
        if self.training:
            with torch.no_grad():
                self.running = self.running.lerp(x.mean(0), 0.1)
        return y

    def _make_experts(self) -> None:
        self.first, self.other = self._new(self.width, self.width), self._new(self.width, self.width)

    def _do_experts(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.first if self.moment.step % 2 else self.other))

    def _make_stash(self) -> None:
        self.first = self._new(self.width, self.width)

    def _do_stash(self, x: Tensor) -> Tensor:
        return torch.tanh(Stashing.apply(x, self.first))

    def _make_vmap(self) -> None:
        self.first, self.bias = self._new(self.width, self.width), self._new(self.width)

    def _do_vmap(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(self.first @ row + self.bias))(x)

    def _make_nothing(self) -> None:
        pass

    def _do_nothing(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _make_parameter(self) -> None:
        self.first = self._new(1, self.width)

    def _do_parameter(self, x: Tensor) -> Tensor:
        return self.first

    def _make_slice(self) -> None:
        self.first = self._new(8, self.width)

    def _do_slice(self, x: Tensor) -> Tensor:
        return self.first[1 : 1 + len(x)]


class Stashing(torch.autograd.Function):
    """Keeps its operands as attributes, where saved-tensor hooks do not see them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient
