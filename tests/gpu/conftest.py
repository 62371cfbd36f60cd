"""The accelerator for the tests of this folder, and groups of ranks on it.

`pytest tests/gpu` runs them on CUDA, and skips them where there is none; `--device=sim` runs them on the simulated
device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.gpu import devices
from tests.gpu.devices import Accelerator
from tests.gpu.gloo_on_cuda import CALLS, refused_by_gloo
from tests.support.ranks import RanksFailed

HERE = Path(__file__).parent


_chosen = functools.cache(devices.chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules here that say `RUNS_ON_CPU = True` run everywhere, the others on an accelerator only."""
    for item in items:
        if HERE not in item.path.parents or getattr(getattr(item, "module", None), "RUNS_ON_CPU", False):
            continue
        chosen = _chosen(config.getoption("--device"))
        if isinstance(chosen, str):
            item.add_marker(pytest.mark.skip(reason=chosen))
        # What a driver, NCCL or an older torch warns of is none of ours: shown, but no error.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def accelerator(pytestconfig: pytest.Config) -> Accelerator:
    """The device, made current and ready."""
    chosen = _chosen(pytestconfig.getoption("--device"))
    assert isinstance(chosen, Accelerator), "without one, tests are skipped"
    return chosen


@pytest.fixture
def fake_ranks(accelerator: Accelerator) -> Callable[..., AbstractContextManager[DeviceMesh]]:
    """`with fake_ranks(8) as mesh:` this process is rank 0 of 8 on torch's fake group; `fake_ranks(2, 4)` is 2-D."""

    @contextmanager
    def ranks(*shape: int) -> Iterator[DeviceMesh]:
        size = torch.Size(shape).numel()
        dist.init_process_group(accelerator.fake_group, rank=0, world_size=size, store=FakeStore())
        try:
            names = ("replicate", "shard")[-len(shape) :]
            yield init_device_mesh(accelerator.kind, shape, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()

    return ranks


@pytest.fixture(scope="module")
def alone(accelerator: Accelerator) -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on the accelerator's own collectives."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # there may be no network
    eager = {"device_id": accelerator.device} if accelerator.kind == "cuda" else {}
    dist.init_process_group(accelerator.collectives, rank=0, world_size=1, store=dist.HashStore(), **eager)
    try:
        yield init_device_mesh(accelerator.kind, (1,))
    finally:
        dist.destroy_process_group()


# Several ranks


class SimulatedRanks:
    """Ranks with a simulated device each, asked as `tests.support.ranks.Processes` are."""

    def __init__(self, world: Any, num_ranks: int) -> None:
        self._world = world
        self.num_ranks = num_ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Returns `fn(*args)` of every rank. What a function asks its accelerator for is counted in the function."""
        __tracebackhide__ = True
        values: list[Any] = self._world.observe(fn, *args, timeout=timeout).values
        return values


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, accelerator: Accelerator) -> Callable[[int], Any]:
    """`ranks(n).run(fn, ...)` runs fn on n processes; the results, index = rank.

    Each has a simulated device of its own. On CUDA they share the first GPU, over gloo.
    """
    if accelerator.kind == "cuda":
        return request.getfixturevalue("world")
    from simdevice.ranks import World
    from tests.device.ranks import SETUP

    pools = request.getfixturevalue("pools")
    return functools.cache(lambda num_ranks: SimulatedRanks(World(pools.world(num_ranks, SETUP)), num_ranks))


@pytest.fixture(scope="session")
def refused(accelerator: Accelerator, ranks: Callable[[int], Any]) -> dict[str, str]:
    """Returns which collectives gloo does not do with CUDA tensors, by name, with what it said."""
    if accelerator.kind != "cuda":
        return {}
    found = {}
    for call in CALLS:  # each in a run of its own, for some end the process
        try:
            said = ranks(2).run(refused_by_gloo, call)[0]
        except RanksFailed as error:
            said = next(line for line in str(error).splitlines() if "died" in line)
        if said:
            found[call] = said
    return found


@pytest.fixture
def ranks_with(ranks: Callable[[int], Any], refused: dict[str, str]) -> Callable[..., Any]:
    """`ranks_with(n, *calls)` is `ranks(n)`, where these collectives carry the device's tensors; else it skips."""

    def checked(num_ranks: int, *calls: str) -> Any:
        missing = {call: why for call, why in refused.items() if call in calls}
        if missing:
            pytest.skip(f"gloo does not do this with CUDA tensors: {missing}")
        return ranks(num_ranks)

    return checked
