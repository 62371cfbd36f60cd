"""Muon over shards on a device, and over shards that rest in host memory, steps as in one process, and in order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sherd
from tests.device.small import built, sharded, step
from tests.support import sharding


def muon(model: torch.nn.Module) -> sherd.Muon:
    return sherd.Muon(model, lr=0.02, beta2=0.95, ns_dtype=torch.float32)


def steps(model: torch.nn.Module, optimizer: sherd.Muon, device: str = "sim") -> list[float]:
    return [step(model, optimizer, number, device) for number in range(4)]


def trained(how: str, in_backward: bool) -> list[float]:
    model = sharded(built("sim"), how)
    optimizer = muon(model)
    if in_backward:
        sherd.step_in_backward(model, optimizer)
    return steps(model, optimizer)


def assert_as_on_the_host(runs: list[list[float]]) -> None:
    plain = built("cpu")
    expected = steps(plain, muon(plain), "cpu")
    for losses in runs:
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        *("shard", "owned", "flat", "shard, offloaded", "owned, offloaded", "wrapper, offloaded"),
        *("flat wrapper", "flat wrapper, offloaded"),
    ],
)
def test_muon_on_a_device_trains_as_on_the_host(how, in_backward, sim_world):
    assert_as_on_the_host(sim_world(2).run(trained, how, in_backward).values)


def offloaded_under_a_group_of_devices(front: str) -> tuple[list[float], set[str]]:
    group = dist.new_group(backend="simccl")  # as nccl alone, it carries no tensors of the host
    mesh = DeviceMesh.from_group(group, "sim", mesh_dim_names=("shard",))
    model = sharding.sharded(built("sim"), front, mesh=mesh, offload_policy=sherd.CPUOffloadPolicy())
    optimizer, devices = muon(model), set()
    updates = optimizer.updates
    optimizer.updates = lambda group, given, kept: devices.add(given.device.type) or updates(group, given, kept)
    return steps(model, optimizer), devices


@pytest.mark.parametrize("front", ["shard", "owned"])
def test_matrices_of_shards_in_host_memory_travel_and_are_computed_on_devices(front, sim_world):
    found = sim_world(2).run(offloaded_under_a_group_of_devices, front).values
    assert_as_on_the_host([losses for losses, _ in found])
    assert set.union(*(devices for _, devices in found)) == {"sim"}
