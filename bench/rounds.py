"""How time is taken: every system in each round, in an order that rotates, with nothing else in between."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Lap:
    """One timed call. CPU time is that of the whole process: the threads of gloo and autograd count too; so are
    `page_faults`, the pages that it had mapped without reading a disk."""

    wall_ms: float
    cpu_ms: float
    page_faults: int = 0


@contextmanager
def without_collector() -> Iterator[None]:
    """A garbage collection inside a lap would be charged to whichever system happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Lap, Result]:
    """Call `work` once. On an accelerator wall time is taken by events around it, and the device is idle before."""
    if device.type != "cpu":
        return _timed_by_events(work, device)
    faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
    result = work()
    wall, cpu, faults = time.perf_counter() - wall, time.process_time() - cpu, _page_faults() - faults
    return Lap(wall * 1e3, cpu * 1e3, faults), result


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _timed_by_events(work: Callable[[], Result], device: torch.device) -> tuple[Lap, Result]:
    start, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    cpu = time.process_time()
    start.record()
    result = work()
    end.record()
    cpu = time.process_time() - cpu  # what the host spent on launching, not on waiting
    torch.accelerator.synchronize()
    return Lap(start.elapsed_time(end), cpu * 1e3), result


def interleaved(runners: Mapping[str, Callable[[int], Lap]], num_rounds: int) -> dict[str, list[Lap]]:
    """`num_rounds` laps per runner. Each round starts one runner later, so none is always first or last."""
    names = list(runners)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            laps[name].append(runners[name](number))
    return laps
