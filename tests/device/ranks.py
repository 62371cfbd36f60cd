"""Functions of a test run on several ranks, each with a simulated device of its own.

    def sum_of_ranks():                                    # at module level: ranks import it by name
        total = torch.ones(1, device="sim")                # the current device is sim:<rank>
        dist.all_reduce(total)
        return total

    def test_every_rank_sees_the_sum(sim_world):
        found = sim_world(2, pause_us=300, seed=1).run(sum_of_ranks)
        assert found.values == [2, 2]                      # index = rank; tensors come as CPU tensors
        assert not any(found.host_waits)

`run` fails if the device has found a race on any rank. `observe` does not: it returns the races with the rest. The
keywords of `sim_world` are those of `sim.configure`, which holds for one run; races and host waits are counted from its
start. For all else see `tests/support/ranks`: these are the same pools of live processes, set up otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.device import sim
from tests.support.ranks import MAX_PROCESSES, Pools, Processes, Setup

TIMEOUT = timedelta(seconds=30)
"""Of every group. Shorter than a run may take, so that the rank that does not come is named."""


@dataclass(frozen=True)
class Found:
    """What a function returned on each rank, and what the device saw meanwhile: how often, by text. Index = rank."""

    values: list[Any]
    races: list[dict[str, int]]
    host_waits: list[dict[str, int]]

    @property
    def all_races(self) -> list[str]:
        """The races of all ranks, each once."""
        return sorted({race for races in self.races for race in races})


class SimWorld:
    """Ranks with a simulated device each, which runs as `settings` say."""

    def __init__(self, processes: Processes, settings: dict[str, Any]) -> None:
        self._processes = processes
        self._settings = settings

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> Found:
        """`fn(*args, **kwargs)` on every rank. Raises RanksFailed, and AssertionError if there was a race."""
        __tracebackhide__ = True
        found = self.observe(fn, *args, timeout=timeout, **kwargs)
        races = "\n".join(found.all_races)
        assert not races, f"nothing puts these in an order ({self._settings}):\n{races}"
        return found

    def observe(self, fn: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> Found:
        """As `run`, but races are only returned."""
        __tracebackhide__ = True
        seen = self._processes.run(_watched, self._settings, fn, args, kwargs, timeout=timeout)
        values, races, waits = zip(*seen, strict=True)
        return Found(list(values), list(races), list(waits))


def _watched(
    settings: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, int], dict[str, int]]:
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    torch.accelerator.synchronize()
    sim.configure(**settings)
    sim.races(), sim.host_waits()
    try:
        value = fn(*args, **kwargs)
        waits = sim.host_waits()
        torch.accelerator.synchronize()  # what a worker fails at is raised here, at the latest
        return value, sim.races(), waits
    finally:
        sim.configure()


def _prepare(rank: int) -> None:
    os.environ.setdefault("SIM_DEVICES", str(MAX_PROCESSES))
    sim.load()
    torch.accelerator.set_device_index(rank)
    distributed_c10d.default_pg_timeout = TIMEOUT  # that of a mesh's groups


SETUP = Setup("cpu:gloo,sim:simccl", _prepare, TIMEOUT)


@pytest.fixture(scope="session")
def sim_world(pools: Pools, loaded: torch.device) -> Callable[..., SimWorld]:
    """`sim_world(n, **settings).run(fn, ...)` runs fn on n processes, 1 to 4, with a simulated device each. It is built
    by now: `loaded`."""
    return lambda num_ranks, **settings: SimWorld(pools.world(num_ranks, SETUP), settings)
