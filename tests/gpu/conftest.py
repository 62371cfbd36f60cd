"""What do the tests on a GPU find ready? A reason to skip where there is none, and groups of ranks for one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

HERE = Path(__file__).parent
NO_GPU = "torch.cuda.is_available() is false: these tests need one CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules here that say `RUNS_ON_CPU = True` run everywhere, the others on CUDA only."""
    for item in items:
        if HERE not in item.path.parents or getattr(getattr(item, "module", None), "RUNS_ON_CPU", False):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        # What a driver, NCCL or an older torch warns of is none of ours: shown, but no error.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The device, made current and ready."""
    torch.cuda.init()
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def fake_ranks(gpu: torch.device) -> Callable[..., AbstractContextManager[DeviceMesh]]:
    """`with fake_ranks(8) as mesh:` this process is rank 0 of 8 on torch's fake group; `fake_ranks(2, 4)` is 2-D."""

    @contextmanager
    def ranks(*shape: int) -> Iterator[DeviceMesh]:
        size = torch.Size(shape).numel()
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            names = ("replicate", "shard")[-len(shape) :]
            yield init_device_mesh("cuda", shape, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()

    return ranks


@pytest.fixture(scope="module")
def nccl_alone(gpu: torch.device) -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on NCCL."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # there may be no network
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=gpu)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()
