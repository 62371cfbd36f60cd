"""Every test here finds the device loaded, idle, with its defaults and nothing noted; or is skipped."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported, here and in the ranks: one thread each, or four ranks on two cores fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without it gloo asks the resolver for this machine's name, which is slow or fails where there is no network.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import torch

import simdevice
from simdevice.ranks import Processes, World


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds")


@pytest.fixture(scope="session")
def loaded() -> torch.device:
    try:
        return simdevice.load()
    except simdevice.CannotBuild as reason:
        pytest.skip(f"the simulated device cannot be built: {reason}")


@pytest.fixture(autouse=True)
def device(loaded: torch.device) -> Iterator[torch.device]:
    """The device "sim:0". A race that a test does not ask for by `simdevice.races()` fails it."""
    forget()
    yield loaded
    for hook in (simdevice.on_host_wait, simdevice.label_tasks, simdevice.label_allocations):
        hook(None)
    torch.accelerator.synchronize()
    unexpected = simdevice.races()
    forget()
    assert not unexpected


def forget() -> None:
    gc.collect()  # a test that raised on purpose may have left tensors in a cycle
    simdevice.configure()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    torch.accelerator.empty_cache()
    torch.manual_seed(0)
    simdevice.races()
    simdevice.host_waits()


@pytest.fixture(scope="session")
def sim_world(loaded: torch.device) -> Iterator[Callable[..., World]]:
    """`sim_world(n, **settings).run(fn, ...)` runs fn on n processes, with a device each, which live as long as the
    session."""
    pools: dict[int, Processes] = {}

    def world(num_ranks: int, **settings: Any) -> World:
        return World(pools.setdefault(num_ranks, Processes(num_ranks)), **settings)

    yield world
    for pool in pools.values():
        pool.stop()
