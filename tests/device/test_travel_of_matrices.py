"""Matrices travel beside products on a device: in the order of streams, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sherd
import simdevice
from sherd.optim import matrix_plan
from tests.device.small import loss_of
from tests.support.models import chain

STEPS = 4
PLACEMENTS = {"owned gradients": None, "Shard": Shard(0), "Flat": sherd.Flat(), "Owned": sherd.Owned()}
MESHES = {"2": ((2,), None), "2 x 2": ((2, 2), ("replicate", "shard"))}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> tuple[list[float], list[str]]:
    """The losses, and what the host waited for in the last step of the optimizer."""
    losses, waits = [], []
    for number in range(STEPS):
        loss = loss_of(model, number, device)
        loss.backward()
        losses.append(loss.item())
        heard: list[str] = []
        if device == "sim":
            simdevice.on_host_wait(heard.append)
        optimizer.step()
        if device == "sim":
            simdevice.on_host_wait(None)
        optimizer.zero_grad()
        waits = heard
    return losses, waits


def on_device(how: str, shape: str) -> tuple[list[float], list[str], int]:
    usual, matrix_plan.BUCKET_BYTES = matrix_plan.BUCKET_BYTES, 64
    try:
        sizes, names = MESHES[shape]
        mesh = init_device_mesh("sim", sizes, mesh_dim_names=names)
        options = {} if PLACEMENTS[how] is None else {"placement": PLACEMENTS[how]}
        model = chain(4, 24).to("sim")
        for unit in (*model, model):
            sherd.fully_shard(unit, mesh=mesh, **options)
        optimizer = sherd.Muon(model, lr=0.02, ns_dtype=torch.float32)
        return *trained(model, optimizer, "sim"), len(optimizer._plan_of(optimizer.matrix_groups()).buckets)
    finally:
        matrix_plan.BUCKET_BYTES = usual


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("how", PLACEMENTS)
def test_muon_computes_beside_its_exchange_without_a_race_or_a_host_wait(how, shape, sim_world):
    plain = chain(4, 24)
    expected, _ = trained(plain, sherd.Muon(plain, lr=0.02, ns_dtype=torch.float32), "cpu")
    for seed in range(3):
        found = sim_world(4 if "x" in shape else 2, pause_us=300, seed=seed).run(on_device, how, shape)
        for losses, waits, num_buckets in found.values:
            assert losses == pytest.approx(expected, rel=1e-4)
            assert not waits
            assert num_buckets > 1 or how == "Owned"
