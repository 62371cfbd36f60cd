"""A small model on a device of two ranks, for tests of what is done to it beside training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.support import sharding
from tests.support.models import chain, noise

WIDTH = 24


def built(where: str) -> nn.Sequential:
    """Two blocks and a head, with the same weights each time."""
    return chain(2, WIDTH).append(nn.Linear(WIDTH, 5)).to(where)


def sharded(model: nn.Sequential, how: str = "shard", **options: Any) -> Any:
    """Shards the blocks and the rest by one of `FRONTS`; ", offloaded" may follow. A wrapper is one unit."""
    front, offloaded = how.removesuffix(", offloaded"), how.endswith(", offloaded")
    mesh = init_device_mesh("sim", (2,))
    if front in sharding.WRAPPERS:
        options |= {"device_mesh": mesh, "cpu_offload": sherd.CPUOffload(offload_params=offloaded)}
        options["device_id"] = torch.accelerator.current_device_index()
        return sharding.sharded(model, front, [model], **options)
    if offloaded:
        options["offload_policy"] = sherd.CPUOffloadPolicy()
    return sharding.sharded(model, front, [*model[:2], model], mesh=mesh, **options)


def loss_of(model: nn.Module, number: int, device: str = "sim") -> Tensor:
    return model(noise(number, 0, 3, WIDTH).to(device)).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str = "sim") -> float:
    loss = loss_of(model, number, device)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
