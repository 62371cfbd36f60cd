"""A rank is killed in the middle of a training: do the others say which, in time, and is anything left of the run?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sherd

from ..device.cases import TINY
from ..systems import SHERD, device_of

NAMED_WITHIN_S = 15.0
NUM_STEPS = 5
EXPECTED = ("torchinductor_", "sherd-flight-")
"""What is made on purpose: the cache of torch's compiler, and a record of each rank that has lost another."""
MARK = "BENCH_GPUS_RUN"
"""A variable by which the processes of this run are found again."""


def lose(mesh: DeviceMesh, lost: int) -> tuple[float, str]:
    """On a rank: seconds until the loss of the rank `lost` was raised here, and what was said. That rank does not
    return."""
    device = device_of(mesh)
    model = SHERD.distribute(TINY.on(device, torch.float32), mesh)
    batch = [each.to(device) for each in TINY.batch(mesh.get_rank())]
    for _step in range(2):
        model(*batch).backward()
    torch.accelerator.synchronize()
    dist.barrier()
    if mesh.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _step in range(NUM_STEPS):
            model(*batch).backward()
            torch.accelerator.synchronize()
    except sherd.SherdError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


@contextmanager
def left_behind(folder: Path) -> Iterator[list[str]]:
    """Inside, the list is empty: on leaving it holds what is left of the run, in words. `folder` is where the run puts
    its temporary files."""
    left: list[str] = []
    shared, own = _shared_memory(), str(os.getpid())
    os.environ[MARK] = own
    try:
        yield left
    finally:
        del os.environ[MARK]
        until = time.monotonic() + 5  # a process that was killed may still be on its way out
        while (processes := _processes(own)) and time.monotonic() < until:
            time.sleep(0.1)
        left += [f"process {each}" for each in processes]
        left += [f"/dev/shm/{name}" for name in sorted(_shared_memory() - shared)]
        left += [str(each) for each in sorted(folder.iterdir()) if not each.name.startswith(EXPECTED)]


def _processes(mark: str) -> list[str]:
    """Those that were started in this run, but Python's own tracker of resources, which ends with this process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            started_here = f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # of another user, or gone
            continue
        if started_here and words and place.name != mark and "resource_tracker" not in words:
            found.append(place.name)
    return found


def _shared_memory() -> set[str]:
    """The names of this user's segments. No semaphores: no rank makes any, and those of other programs come and go."""
    try:
        found = {each.name for each in Path("/dev/shm").iterdir() if each.stat().st_uid == os.getuid()}
        return {each for each in found if not each.startswith("sem.")}
    except OSError:
        return set()
