"""Ranks with simulated devices tell of races and waits, each run for itself."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import simdevice


def race(times: int) -> torch.Tensor:
    """Two streams write the same memory, on rank 1 alone."""
    x = torch.zeros(4, device="sim")
    for _ in range(times if dist.get_rank() == 1 else 0):
        with torch.Stream(device="sim"):
            x.add_(1)
    return x


def wait_and_tell() -> tuple[int, str, bool]:
    x = torch.ones(4, device="sim")
    value = int(x.sum().item())
    return value, str(x.device), dist.get_backend(dist.group.WORLD) is not None


def poisoned() -> bool:
    return bool(torch.empty(4, device="sim").isnan().all())


def test_race_on_one_rank_fails_the_run_and_the_next_one_begins_with_nothing_noted(sim_world):
    with pytest.raises(AssertionError, match=r"zero.* on sim:1 stream 0, and unordered with it add"):
        sim_world(2).run(race, 1)
    seen = sim_world(2).observe(race, 1).races
    assert seen[0] == {}
    assert seen[1]
    found = sim_world(2).run(race, 0)
    assert found.races == [{}, {}]
    assert found.host_waits == [{}, {}]
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in found.values)


def test_rank_has_its_own_device_and_counts_its_waits(sim_world):
    found = sim_world(4).run(wait_and_tell)
    assert found.values == [(4, f"sim:{rank}", True) for rank in range(4)]
    assert all(sum(waits.values()) == 1 for waits in found.host_waits)


def test_settings_hold_for_one_run_and_ranks_are_kept(sim_world):
    pids = sim_world(2).run(os.getpid).values
    assert sim_world(2).run(poisoned).values == [True, True]
    sim_world(2, spoil="no", pause_us=5, races="off").run(race, 2)
    assert sim_world(2).observe(race, 1).races[1]
    assert sim_world(2).run(poisoned).values == [True, True]
    assert sim_world(2, seed=1).run(os.getpid).values == pids
    assert simdevice.races(reset=False) == {}
