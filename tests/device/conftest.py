"""Every test here finds the simulated device loaded, idle, with its defaults and nothing noted; or is skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import simdevice
from tests.device.ranks import sim_world as sim_world


@pytest.fixture(scope="session")
def loaded(pytestconfig: pytest.Config) -> torch.device:
    if pytestconfig.getoption("--device") != "sim":
        pytest.skip("these tests are for --device=sim")
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
