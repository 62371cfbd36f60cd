"""Offload on one rank, a case of its own: copies of several units are under way behind compute, straight from where
they rest to where they are used; no collective is called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import sherd
import simdevice
from sherd import CPUOffloadPolicy, OffloadPolicy
from tests.device.test_offload_axes import AXES, made, model_of, stepped
from tests.device.test_peaks import GPT, TOKENS, held_before, requested


def calls_and_waits(policy: OffloadPolicy) -> tuple[int, dict[str, int], list[str]]:
    """The collectives of a steady-state step, what the host waited for in it, and the values."""
    model = model_of(policy)
    optimizer = made(optim.AdamW, model)
    stepped(model, optimizer, 2)
    seen = []
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather", "reduce_scatter")
    real = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, lambda *args, name=name, **kwargs: seen.append(name) or real[name](*args, **kwargs))
    try:
        x = torch.ones(3, 24).to("sim")
        simdevice.host_waits()
        gate = simdevice.closed_gate()  # else the device may be done before the host looks
        simdevice.on_host_wait(lambda cause: gate.open())
        model(x).square().mean().backward()
        simdevice.on_host_wait(None)
        waits = simdevice.host_waits()
        gate.open()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        for name in names:
            setattr(dist, name, real[name])
    return len(seen), waits, seen


@pytest.mark.parametrize("axis", ["state", "step", "everything"])
def test_no_collective_is_called_and_the_host_waits_for_gradients_alone(axis, sim_world):
    ((num_calls, waits, seen),) = sim_world(1).run(calls_and_waits, AXES[axis]).values
    assert num_calls == 0, seen
    assert waits == ({} if axis == "state" else {"Event.synchronize": 1})


def peak() -> int:
    """The most bytes asked for in a steady-state step with all of a GPT in host memory."""
    before = held_before()
    torch.manual_seed(0)
    model: nn.Module = GPT().to("sim")
    mesh = dist.device_mesh.init_device_mesh("sim", (1,))
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        requested()
        model(torch.zeros(2, TOKENS, dtype=torch.long, device="sim")).logsumexp(-1).mean().backward()
        found = requested() - before
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_few_units_are_on_the_device_at_a_time(sim_world):
    (found,) = sim_world(1).run(peak).values
    unit = 4 * sum(each.numel() for each in GPT().blocks[0].parameters())
    rest = 4 * 2 * 512 * 256
    assert found <= 4 * unit + 3 * rest, "one that is used, one that comes, gradients of one that go"
