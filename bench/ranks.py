"""Where it runs: processes that are ranks of a real group, or one process as rank 0 of a fake one."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

Given = ParamSpec("Given")
Result = TypeVar("Result")

TIMEOUT = timedelta(minutes=3)  # a rank that died takes the run down within this time, not never


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a user chose on the command line."""

    device: str = "cpu"
    quick: bool = False
    rounds: int = 9
    cpu_ranks: int = 2

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    @property
    def num_processes(self) -> int:
        """`cpu_ranks` gloo ranks on the CPU; a rank per GPU; with a single GPU one process, whose group is fake."""
        return max(self.num_gpus, 1) if self.device == "cuda" else self.cpu_ranks

    @property
    def group_is_real(self) -> bool:
        return self.num_processes > 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the group, be they real or not."""
        return max(self.num_processes, 2)


def on_ranks(
    conditions: Conditions, work: Callable[Concatenate[DeviceMesh, Given], Result], *args: Given.args
) -> list[Result]:
    """Call `work(mesh, *args)` on every rank, each a fresh process; the results come in rank order.

    With one GPU there is one process and one result: the mesh has 2 ranks, of which rank 0 runs.
    """
    if not conditions.group_is_real:
        return [on_fake_ranks(conditions, conditions.num_ranks, work, *args)]
    backend = "nccl" if conditions.device == "cuda" else "gloo"
    num_ranks = conditions.num_ranks
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool,
    ):
        meeting = (Path(folder) / "meeting").as_uri()
        ranks = [
            pool.submit(_as_rank, conditions.device, backend, meeting, num_ranks, rank, work, args)
            for rank in range(num_ranks)
        ]
        return [rank.result() for rank in ranks]


def on_fake_ranks(
    conditions: Conditions,
    num_ranks: int,
    work: Callable[Concatenate[DeviceMesh, Given], Result],
    *args: Given.args,
) -> Result:
    """Call `work(mesh, *args)` in one fresh process that believes to be rank 0 of `num_ranks`."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_as_rank, conditions.device, "fake", "", num_ranks, 0, work, args).result()


def first_ranks(mesh: DeviceMesh, num_ranks: int, backend: str | None = None) -> DeviceMesh:
    """A 1-D mesh over ranks 0 to `num_ranks - 1`, on a new group of its own."""
    group = dist.new_group(range(num_ranks), backend=backend)
    return DeviceMesh.from_group(group, mesh.device_type)


def _as_rank(
    device: str,
    backend: str,
    meeting: str,
    num_ranks: int,
    rank: int,
    work: Callable[..., Result],
    args: tuple[Any, ...],
) -> Result:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # the older systems warn of their own successors
    # Else gloo asks the resolver for this machine's name, which is slow or fails where there is no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    if backend == "fake":
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    else:
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        return work(init_device_mesh(device, (num_ranks,)), *args)
    finally:
        dist.destroy_process_group()
