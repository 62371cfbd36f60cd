"""Checkpoints of models on a device: saved by this thread or another one while training goes on, and loaded there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sherd

WIDTH = 24


def built(where: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*block, nn.Linear(WIDTH, 5)).to(where)


def sharded(front: str) -> nn.Module:
    mesh = init_device_mesh("sim", (2,))
    model = built("sim")
    if front == "wrapper":
        return sherd.FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=False)
    options = {"mesh": mesh, "placement": sherd.Flat() if front == "flat" else None}
    if front == "offload":
        options["offload_policy"] = sherd.CPUOffloadPolicy()
    for each in model[:3]:
        sherd.fully_shard(each, **options)
    return sherd.fully_shard(model, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str) -> float:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained_while_saving(folder: str, front: str) -> list[float]:
    """The losses after a save that another thread finishes, and the same again after a load."""
    model = sharded(front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step(model, optimizer, 0, "sim")
    items = {"model": model, "optimizer": optimizer}
    saving = sherd.async_save(folder, items, step=1)
    losses = [step(model, optimizer, number, "sim") for number in (1, 2)]
    saving.wait()
    sherd.load(folder, items)
    assert [step(model, optimizer, number, "sim") for number in (1, 2)] == losses
    sherd.load(folder, items)
    sherd.save(folder, items, step=2)
    return losses


@pytest.mark.parametrize("front", ["rows", "flat", "wrapper", "offload"])
def test_a_device_trains_on_while_its_shards_are_written_and_goes_on_from_them(sim_world, tmp_path, front):
    losses = sim_world(2, pause_us=300).run(trained_while_saving, str(tmp_path), front).values[0]
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    for saved in (1, 2):
        sherd.load(tmp_path, {"model": model, "optimizer": optimizer}, step=saved)
        found = [step(model, optimizer, number, "cpu") for number in (1, 2)]
        assert found == pytest.approx(losses, rel=1e-4)
