"""Where it runs: processes that are ranks of a real group, or one process as rank 0 of a fake one."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from . import silent_group

Given = ParamSpec("Given")
Result = TypeVar("Result")

TIMEOUT = timedelta(minutes=3)  # a rank that died takes the run down within this time, not never


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a user chose on the command line. `--help` says what the fields are."""

    device: str = "cpu"
    quick: bool = False
    rounds: int = 9
    cpu_ranks: int = 2
    load: str = ""
    """`module` or `module:function`, which makes an out-of-tree device known to torch; also in each rank."""

    # The figure `device` alone
    minutes: float = 8.0
    stack: str = ""
    cases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("real", "fake")
    lines: Path | None = None

    @property
    def num_devices(self) -> int:
        return torch.accelerator.device_count() if self.device != "cpu" else 0

    @property
    def num_processes(self) -> int:
        """`cpu_ranks` gloo ranks on the CPU; a rank per device; with a single one one process, whose group is fake."""
        return max(self.num_devices, 1) if self.device != "cpu" else self.cpu_ranks

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

    With one accelerator there is one process and one result: the mesh has 2 ranks, of which rank 0 runs.
    """
    if not conditions.group_is_real:
        return [on_fake_ranks(conditions, conditions.num_ranks, work, *args)]
    num_ranks = conditions.num_ranks
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool,
    ):
        meeting = (Path(folder) / "meeting").as_uri()
        ranks = [
            pool.submit(_call, Place(conditions.device, "real", num_ranks, rank, meeting, conditions.load), work, args)
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
        place = Place(conditions.device, "fake", num_ranks, load=conditions.load)
        return pool.submit(_call, place, work, args).result()


def first_ranks(mesh: DeviceMesh, num_ranks: int, backend: str | None = None) -> DeviceMesh:
    """A 1-D mesh over ranks 0 to `num_ranks - 1`, on a new group of its own."""
    group = dist.new_group(range(num_ranks), backend=backend)
    return DeviceMesh.from_group(group, mesh.device_type)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of one group.

    `kind`: "real" for the device's own backend, "fake" for torch's, whose collectives copy what this rank has,
    "silent" for one whose collectives do nothing. `meeting`: where the ranks of a real group find each other.
    """

    device: str
    kind: str
    num_ranks: int
    rank: int = 0
    meeting: str = ""
    load: str = ""


def _call(place: Place, work: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    with joined(place) as mesh:
        return work(mesh, *args)


@contextmanager
def joined(place: Place) -> Iterator[DeviceMesh]:
    """This process as the rank at `place`: a mesh of all ranks, on a device of this rank's own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # the older systems warn of their own successors
    # Else gloo asks the resolver for this machine's name, which is slow or fails where there is no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    load_device(place.load)
    if place.device != "cpu":
        torch.accelerator.set_device_index(place.rank)
    numbers = {"rank": place.rank, "world_size": place.num_ranks}
    if place.kind == "real":
        dist.init_process_group(backend_of(place), init_method=place.meeting, timeout=TIMEOUT, **numbers)
    else:
        dist.init_process_group(backend_of(place), store=FakeStore(), **numbers)
    try:
        yield init_device_mesh(place.device, (place.num_ranks,))
    finally:
        dist.destroy_process_group()


def backend_of(place: Place) -> str:
    """What `init_process_group` is told: a backend for the device, and one for tensors on the CPU."""
    if place.kind == "silent":
        silent_group.register(place.device)
        return silent_group.NAME
    if place.kind == "fake":
        # The fake backend knows torch's own devices by name. For others it is named device by device.
        known = place.device in dist.Backend.backend_capability["fake"]
        return "fake" if known else f"cpu:fake,{place.device}:fake"
    if place.device == "cpu":
        return "gloo"
    return f"cpu:gloo,{place.device}:{dist.get_default_backend_for_device(place.device)}"


def load_device(load: str) -> None:
    """Import the module in `module` or `module:function`, and call the function."""
    if load:
        name, _, function = load.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
