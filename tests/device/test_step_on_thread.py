"""Steps on a thread of the host, with a device: values to the bit, no race, and no wait of the host in backward."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import optim

import sherd
import simdevice
from sherd import CPUOffloadPolicy, Disk, OffloadPolicy
from sherd.optim import chunks
from sherd.optim.flat import Stepper
from tests.device.test_offload_axes import WIDTH, model_of
from tests.support.models import noise

POLICIES = {
    "parameters": CPUOffloadPolicy(),
    "gradients": OffloadPolicy(gradients="host"),
    "half": OffloadPolicy(gradients="host", share=0.5),
    "pageable": CPUOffloadPolicy(pin_memory=False),
}
MASTERS = OffloadPolicy(gradients="host", masters="host")
WAYS = ("after", "in backward", "clip", "scaler", "accumulate")


def trained(policy: OffloadPolicy, kind: Any, way: str, on_thread: bool, dtype: torch.dtype = torch.float32) -> Any:
    """The unsharded parameters, who made steps of units, and what the caller waited for in the last backward."""
    model = model_of(policy, dtype)
    optimizer = kind(model.parameters())
    scaler = sherd.ShardedGradScaler("sim", init_scale=8.0, enabled=way == "scaler")
    if on_thread:
        sherd.step_on_thread(optimizer)
    if way == "in backward":
        sherd.step_in_backward(model, optimizer)
    makers, waits, compute = list[str](), list[str](), Stepper.compute

    def computed(self: Stepper, *args: Any) -> None:
        makers.append(threading.current_thread().name)
        compute(self, *args)

    def waited(what: str) -> None:
        if "sherd" not in threading.current_thread().name:
            waits.append(what)

    micro = 2 if way == "accumulate" else 1
    with mock.patch.object(Stepper, "compute", computed), mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        for number in range(4):
            with sherd.accumulate(model, micro):
                for at in range(micro):
                    x = noise(2 * number + at, torch.distributed.get_rank(), 3, WIDTH).to("sim").to(dtype)
                    loss = model(x).float().square().mean()
                    simdevice.on_host_wait(waited)
                    scaler.scale(loss).backward()
                    simdevice.on_host_wait(None)
            if way == "clip":
                sherd.clip_grad_norm_(model.parameters(), 0.1)
            if number < 3:
                waits.clear()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=number != 1)
        values = [each.full_tensor().float().cpu() for each in model.parameters()]
    torch.accelerator.synchronize()
    return values, makers, waits


def compared(policy: OffloadPolicy, kind: Any, way: str, dtype: torch.dtype = torch.float32) -> tuple[int, list[str]]:
    expected, *_ = trained(policy, kind, way, False, dtype)
    found, makers, waits = trained(policy, kind, way, True, dtype)
    assert all(map(torch.equal, found, expected))
    return sum("sherd" in each for each in makers), waits


ADAMW, FUSED = partial(optim.AdamW, lr=1e-2), partial(optim.AdamW, lr=1e-2, fused=True)
SGD = partial(optim.SGD, lr=1e-1, momentum=0.9)


def flattened(parameters: Any) -> optim.Optimizer:
    return sherd.flatten_optimizer(ADAMW(parameters))


@pytest.mark.pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [ADAMW, FUSED, SGD, flattened])
def test_values_are_those_of_steps_that_the_caller_makes(kind, policy, way, sim_world):
    if (kind, way) == (flattened, "in backward"):
        return
    for num_made, waits in sim_world(2, pause_us=300, seed=7).run(compared, POLICIES[policy], kind, way).values:
        assert num_made == 3 * (2 if policy == "half" else 4)
        assert not waits or way != "in backward" or policy == "pageable", waits


def test_masters_are_stepped_there_too(sim_world):
    for way in WAYS:
        run = sim_world(2, pause_us=300, seed=8).run(compared, MASTERS, ADAMW, way, torch.bfloat16)
        assert [num_made for num_made, _ in run.values] == [12] * 2, way


def test_what_is_not_in_host_memory_is_stepped_by_the_caller(sim_world, tmp_path):
    for policy in (OffloadPolicy(), OffloadPolicy(gradients="host", optimizer=Disk(str(tmp_path)))):
        values = sim_world(2).run(compared, policy, ADAMW, "after").values
        assert [num_made for num_made, _ in values] == [0] * 2
