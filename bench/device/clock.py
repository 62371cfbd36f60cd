"""What a training costs on its device: milliseconds of steps, host time, idle time of compute, bytes at the peak."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..peak import LiveBytes
from ..rounds import without_collector
from .trace import exposed_ms, idle_ms, traced
from .training import Training

NUM_WARMUPS = 2
NUM_HOST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one rank. All lists are of steps; `loss` is the last step's."""

    step_ms: list[float]
    """From the end of one step to the end of the next, by the device's events; the host does not wait in between."""
    host_ms: list[float]
    """CPU time of the process until the last launch of a step returned; the device is idle before each."""
    launch_ms: list[float]
    """Wall time of the same steps until the last launch returned: more than `host_ms` where the host waited."""
    idle_ms: float | None
    """How long the busiest stream ran nothing in one step, by the profiler's trace; None where it has no such trace."""
    allocated: dict[str, int] = field(default_factory=dict)
    """By phase: most bytes of tensors alive at once."""
    requested: dict[str, int] = field(default_factory=dict)
    """By phase: the same before the allocator rounded sizes up. Empty where there is no caching allocator."""
    reserved: int = 0
    """Most bytes that the allocator held from the device, from the first step on."""
    loss: float = 0.0
    exposed_ms: float | None = None
    """How long collectives ran alone in the traced step; None where the profiler saw none."""


def measured(training: Training, num_steps: int) -> Measured:
    """Warm-up, then steps that are timed, and steps whose memory is counted."""
    if on_accelerator(training):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    with without_collector():
        for number in range(NUM_WARMUPS):
            training.step(training.batches(number))
        step_ms = steady_steps(training, num_steps)
        host_ms, launch_ms = launches(training)
    allocated, requested = peaks(training)
    reserved = torch.accelerator.max_memory_reserved() if on_accelerator(training) else 0
    batches = training.batches(0)
    events = traced(lambda: training.step(batches), training.device)
    loss = float("nan") if training.last_loss is None else float(training.last_loss)
    return Measured(
        step_ms, host_ms, launch_ms, idle_ms(events), allocated, requested, reserved, loss, exposed_ms(events)
    )


def on_accelerator(training: Training) -> bool:
    return training.device.type != "cpu"


def synchronize(training: Training) -> None:
    if on_accelerator(training):
        torch.accelerator.synchronize()


# Time


def steady_steps(training: Training, num_steps: int) -> list[float]:
    """Milliseconds of steps back to back, as in training: the host runs ahead of the device. The first is not timed."""
    given = [training.batches(number) for number in range(num_steps + 1)]
    dist.barrier()  # a rank that is late from before must not be charged to the others
    synchronize(training)
    marks = []
    for batches in given:
        training.step(batches)
        marks.append(_mark(training.device))
    synchronize(training)
    return [_between(first, second) for first, second in pairwise(marks)]


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device.type, enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return 1e3 * (second - first) if isinstance(first, float) else first.elapsed_time(second)


def launches(training: Training) -> tuple[list[float], list[float]]:
    """CPU and wall milliseconds until the host is through with a step. Steps that follow one another would fill the
    queue of launches, and the host's wait for room in it would count."""
    host, launch = [], []
    for number in range(NUM_HOST_STEPS):
        batches = training.batches(number)
        dist.barrier()
        synchronize(training)
        wall, cpu = time.perf_counter(), time.process_time()
        training.step(batches)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        host.append(1e3 * cpu)
        launch.append(1e3 * wall)
    synchronize(training)
    return host, launch


# Memory


def peaks(training: Training) -> tuple[dict[str, int], dict[str, int]]:
    """Most bytes allocated and requested in each phase of one step; of micro-batches the one that takes most."""
    batches = training.batches(0)
    gc.collect()
    return _peaks_by_allocator(training, batches) if on_accelerator(training) else (_peaks_by_dispatcher(training), {})


def _peaks_by_allocator(training: Training, batches: Any) -> tuple[dict[str, int], dict[str, int]]:
    allocated: dict[str, int] = defaultdict(int)
    requested: dict[str, int] = defaultdict(int)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    for phase in training.phases(batches):
        torch.accelerator.synchronize()
        stats = torch.accelerator.memory_stats()
        allocated[phase] = max(allocated[phase], stats["allocated_bytes.all.peak"])
        requested[phase] = max(requested[phase], stats["requested_bytes.all.peak"])
        torch.accelerator.reset_peak_memory_stats()
    return dict(allocated), dict(requested)


def _peaks_by_dispatcher(training: Training) -> dict[str, int]:
    """Two steps: a storage counts from its first use on."""
    found: dict[str, int] = defaultdict(int)
    with LiveBytes() as live:
        training.step(training.batches(0))
        live.forget_peak()
        for phase in training.phases(training.batches(0)):
            found[phase] = max(found[phase], live.peak)
            live.forget_peak()
    return dict(found)
