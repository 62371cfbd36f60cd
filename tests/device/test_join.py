"""Ranks that skip units, or have fewer batches, train as one where collectives run on streams of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.divergence.programs import Chain
from tests.divergence.test_join import SKIPS, Way, assert_as_reference, batch, reference


def trained(of_ranks: list[list[Way]], more: dict[str, Any]) -> dict[str, Tensor]:
    """In parts of a few bytes, which backward frees one by one."""
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    policy = sherd.CommPolicy(divergence="join", part_bytes=64)
    model: Any = Chain().to("sim")
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh, comm_policy=policy, **more)
    sherd.fully_shard(model, mesh=mesh, comm_policy=policy, **more)
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with sherd.join(model, optimizer):
        for step, way in enumerate(of_ranks[rank]):
            model(batch(rank, step).to("sim"), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with sherd.unsharded(model):
        return {name: each.detach().cpu().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize(
    "more", [{}, {"offload_policy": sherd.CPUOffloadPolicy()}, {"reshard_after_forward": False}], ids=str
)
def test_a_rank_that_skips_counts_as_zero(sim_world, more, skips):
    found = sim_world(2, pause_us=200, seed=1).run(trained, SKIPS[skips], more)
    assert found.all_races == []
    assert_as_reference(found.values, reference(SKIPS[skips]))
