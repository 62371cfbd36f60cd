"""Programs whose ranks go different ways, for tests/divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.support import sharding
from tests.support.ranks import Processes, RanksFailed

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


def sharded(
    transport: str = "auto", divergence: str = "error", front: str = "shard", model: Any = None, **more: Any
) -> Any:
    """`Chain`, or another model of blocks, by any front end and placement, a unit a block."""
    policy = sherd.CommPolicy(transport=transport, divergence=divergence)
    return sharding.sharded(Chain() if model is None else model, front, comm_policy=policy, **more)


def joined(front: str = "shard", model: Any = None, **more: Any) -> Any:
    """The same, where ranks may go different ways."""
    return sharded(divergence="join", front=front, model=model, **more)


def hybrid(make: Any = sharded, **more: Any) -> Any:
    """Two replicas."""
    size = (dist.get_world_size() // 2, 2)
    return make(mesh=init_device_mesh("cpu", size, mesh_dim_names=("replicas", "shards")), **more)


def wrapped(**options: Any) -> Any:
    """With the wrapper and flat parameters, a unit a block."""
    return sharding.sharded(Chain(), "flat wrapper", **options)


def batch() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(model: Any, *order: int) -> None:
    """Forward and backward through blocks in this order, or through all."""
    x = batch().to(next(model.parameters()).device)
    model(x, order or tuple(range(NUM_BLOCKS))).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def comm_errors(ranks: Processes, program: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The texts of the CommErrors that `program` ends with on all of `ranks`."""
    with pytest.raises(RanksFailed) as failed:
        ranks.run(program, *args, **kwargs)
    errors = failed.value.errors
    assert {errors[rank][0] for rank in range(ranks.num_ranks)} == {"CommError"}, str(failed.value)
    return [errors[rank][1] for rank in range(ranks.num_ranks)]


def num_calls(owner: Any, name: str, step: Callable[[int], object], num_steps: int) -> list[int]:
    """On a rank: how often each of these steps calls the function of this name."""
    counts, plain = [0] * num_steps, getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        counts[number] += 1
        return plain(*arguments)

    with mock.patch.object(owner, name, counted):
        for number in range(num_steps):
            step(number)
    return counts
