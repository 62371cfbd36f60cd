"""A step that one rank cannot finish, on a device: all ranks skip it, and no stream reads what another still writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.divergence.programs import Chain, batch

JOIN = sherd.CommPolicy(divergence="join")


def hook_that_raises(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("in backward")


def trained(fails_in: dict[int, str], steps: list[int], **more: Any) -> tuple[list[torch.Tensor], list[bool]]:
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    model: Any = Chain().to("sim")
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit, mesh=mesh, comm_policy=JOIN, **more)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    said = []
    for step in steps:
        where = fails_in.get(step) if dist.get_rank() == 1 else None
        with sherd.step(model, optimizer) as attempt:
            out = model(batch().to("sim") + step)
            if where == "nan":
                out = out * float("nan")
            if where == "backward":
                out.register_hook(hook_that_raises)
            if where == "forward":
                raise torch.OutOfMemoryError("behind forward")
            out.square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        said.append(attempt.skipped)
    return [each.to_local().cpu().clone() for each in model.parameters()], said


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("where", ["forward", "backward", "nan"])
def test_ranks_with_devices_skip_together(where, offload, sim_world):
    more: Any = {"offload_policy": sherd.CPUOffloadPolicy(pin_memory=False)} if offload else {}
    found = sim_world(2).run(trained, {0: where, 2: where}, [0, 1, 2, 3], **more)
    without = sim_world(2).run(trained, {}, [1, 3], **more)
    for (values, said), (expected, _) in zip(found.values, without.values, strict=True):
        assert said == [True, False, True, False]
        assert all(map(torch.equal, values, expected))
