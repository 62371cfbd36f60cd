"""Programs whose ranks go different ways, for tests/divergence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sherd

WIDTH, NUM_BLOCKS = 8, 3


class Chain(nn.Module):
    """Its caller says which of its blocks run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(NUM_BLOCKS))) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def sharded(transport: str = "auto", divergence: str = "error", **more: Any) -> Any:
    """With `fully_shard`, a unit a block."""
    policy = sherd.CommPolicy(transport=transport, divergence=divergence)
    model: Any = Chain()
    for block in model.blocks:
        sherd.fully_shard(block, comm_policy=policy, **more)
    return sherd.fully_shard(model, comm_policy=policy, **more)


def wrapped(**options: Any) -> Any:
    """With the wrapper and flat parameters, a unit a block."""
    model: Any = Chain()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = sherd.FullyShardedDataParallel(block, **options)
    return sherd.FullyShardedDataParallel(model, **options)


def batch() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(model: Any, *order: int) -> None:
    """Forward and backward through blocks in this order, or through all."""
    x = batch().to(next(model.parameters()).device)
    model(x, order or tuple(range(NUM_BLOCKS))).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
