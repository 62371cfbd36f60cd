"""Tiny models without a difficulty of their own, for tests of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.specimen import VOCABULARY, WIDTH, Block


def chain(num_blocks: int = 2, width: int = WIDTH) -> nn.Sequential:
    """Returns ordinary blocks in a row, (batch, width) in and out, with the same weights wherever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


class Net(nn.Module):
    """A tiny language model: token numbers (batch, length) in, logits (batch, length, VOCABULARY) out.

    Args:
        num_blocks: how many ordinary blocks there are between the embedding and the head.
        tied: the head's weight is the embedding's.
        frozen: the norm needs no gradient.
    """

    def __init__(self, num_blocks: int = 2, *, tied: bool = False, frozen: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width).requires_grad_(not frozen)
        self.head = nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Wired(nn.Module):
    """Modules and parameters by name, and a forward that is `run(self, ...)`; None, without a forward."""

    def __init__(self, run: Callable[..., Any] | None, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the cross entropy of each next token, the last one followed by the first."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
