"""Gathers and reductions run beside compute on the device, counted from a trace of torch's profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sherd
from bench.device.trace import overlap, traced
from sherd import PrefetchPolicy, fully_shard
from tests.gpu.load import tiled_ranks

WIDTH, BATCH, NUM_BLOCKS = 4096, 4096, 6
LEAST = 0.3
"""Of the lanes' time: the first gather and the last reduction have nothing beside them."""


def block() -> nn.Module:
    """A millisecond of compute or so, for 128 MiB to gather: more than the copies take."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))


def overlap_of_step(mesh, accelerator, placement, depth):
    """The third step's, when the order is known. The ranks are made up, gathers and reductions are copies and sums."""
    device = accelerator.device
    with tiled_ranks(accelerator):
        torch.manual_seed(0)
        model = nn.Sequential(*(block() for _ in range(NUM_BLOCKS))).to(device)
        for each in model:
            fully_shard(each, mesh=mesh, placement=placement)
        fully_shard(model, mesh=mesh, placement=placement, prefetch_policy=PrefetchPolicy(depth, depth))
        x = torch.randn(BATCH, WIDTH, device=device)

        def step():
            model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None

        for _ in range(3):
            step()
        accelerator.synchronize()
        return overlap(traced(step, device))


@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_with_prefetch_lanes_are_busy_beside_compute(placement, accelerator, fake_ranks):
    if not accelerator.has_profiler:
        pytest.skip(f"CUDA only: torch's profiler has no trace of {accelerator.kind}, and its time is not a GPU's")
    with fake_ranks(4) as mesh:
        found = {depth: overlap_of_step(mesh, accelerator, placement, depth) for depth in (0, 1, 2)}
    print(f"share of the lanes' time beside compute, by depth of prefetch: {found}")
    assert found[1] > LEAST, found
    assert found[2] > LEAST, found
    assert found[1] >= found[0] - 0.05, "a gather that starts earlier is not beside less"


@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_the_host_never_waits_for_the_device_in_a_step(placement, accelerator, fake_ranks):
    device = accelerator.device
    with fake_ranks(4) as mesh, tiled_ranks(accelerator):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
        for each in model:
            fully_shard(each, mesh=mesh, placement=placement)
        fully_shard(model, mesh=mesh, placement=placement)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        x = torch.randn(16, 256, device=device)
        for _ in range(3):
            with accelerator.host_waits() as waits:
                model(x).square().mean().backward()
                sherd.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert not waits, "in the third step"


def test_a_host_that_waits_is_seen(accelerator):
    x = torch.ones(4, device=accelerator.device)
    with accelerator.host_waits() as waits:
        x.sum().item()
    assert waits.total() == 1, waits
