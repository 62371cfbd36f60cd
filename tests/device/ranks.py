"""The ranks of `simdevice.ranks` as live processes of `tests/support/ranks`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from simdevice import ranks
from simdevice.ranks import World
from tests.support.ranks import MAX_PROCESSES, Pools, Setup


def _prepare(rank: int) -> None:
    ranks.prepare(rank, MAX_PROCESSES)


SETUP = Setup(ranks.BACKEND, _prepare, ranks.TIMEOUT)


@pytest.fixture(scope="session")
def sim_world(pools: Pools, loaded: torch.device) -> Callable[..., World]:
    """`sim_world(n, **settings).run(fn, ...)` runs fn on n processes, 1 to 4, with a simulated device each. It is built
    by now: `loaded`."""
    return lambda num_ranks, **settings: World(pools.world(num_ranks, SETUP), **settings)
