"""The figure `simulated`: steps on the clock of the simulated device, of models and of ranks that nobody has here.

No time of it was measured on hardware: a kernel, a copy and a collective last what a machine's record says
(`simdevice/README.md`). Nothing is computed, and the other ranks are imagined; the host's calls are real, and so are
the bytes and the host's waits. Every system runs in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd.tools.simulate.cluster import read_cluster

from ..ranks import Conditions
from ..systems import DDP, FLAT, FSDP1, FSDP2, MEGATRON, SHERD, WRAPPER, System
from ..table import RIVALS, Aim, Figure, Row
from .cases import CASES, LARGE, PLAIN, SMALLER, Case, Stack
from .training import Training

P, T = ParamSpec("P"), TypeVar("T")
MACHINE = "h100"
PYTHON = 0.5e-6
"""Seconds of the host for each call of a Python function, or of C from Python: an assumption. By
`bench/device/host_calls.py` the host times of systems on one H200 differ by -0.7 to 0.9 us for each call, in the middle
half of the pairs."""
STEPS = 3
"""The last one is shown: the first ones meet the order of units."""
SYSTEMS = (FSDP1, FSDP2, MEGATRON, SHERD, FLAT, WRAPPER)

LLAMA_8B = Stack("8 B", num_layers=32, width=4096, hidden=14336, num_heads=32, vocab=128256, num_tokens=8192)
LLAMA_70B = Stack("70 B", num_layers=80, width=8192, hidden=28672, num_heads=64, vocab=128256, num_tokens=8192)
EXPERTS = Stack(*("47 B", 32, 4096, 14336, 32, 32000, 8192), num_experts=8, experts_per_token=2)
"""As large as Mixtral 8 x 7 B."""
SMALL = Stack("small", num_layers=48, width=256, hidden=704, num_heads=4, vocab=4096, num_tokens=256)


@dataclass(frozen=True, slots=True)
class Setting:
    """One case of training one stack on a number of ranks, in `num_replicas` groups that shard."""

    stack: Stack
    num_ranks: int
    case: Case = PLAIN
    num_replicas: int = 1
    systems: tuple[System, ...] = SYSTEMS

    @property
    def title(self) -> str:
        """As its rows are called."""
        replicas = f"{self.num_replicas} x " if self.num_replicas > 1 else ""
        return f"{self.stack.name}, {replicas}{self.num_ranks // self.num_replicas} ranks, {self.case.name}"

    def mesh(self) -> DeviceMesh:
        """All ranks, imagined; of two axes where there are replicas."""
        if self.num_replicas == 1:
            return init_device_mesh("sim", (self.num_ranks,))
        shape = (self.num_replicas, self.num_ranks // self.num_replicas)
        return init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard"))


QUICK = (Setting(SMALL, 8, systems=(DDP, *SYSTEMS)),)
SETTINGS = (
    Setting(LLAMA_8B, 8, systems=(DDP, *SYSTEMS)),
    *(Setting(LLAMA_8B, 8, CASES[name]) for name in ("recompute", "mixed", "accumulate")),
    Setting(LARGE, 8, CASES["offload"]),  # whose shards are in this machine's memory
    Setting(SMALLER, 1, CASES["offload"], systems=(FSDP2, SHERD)),
    Setting(LLAMA_8B, 32, num_replicas=4),
    Setting(LLAMA_70B, 64, CASES["recompute"]),
    Setting(EXPERTS, 8, CASES["recompute"]),
    *QUICK,
)
AIMS = {
    ("8 B", "step"): 0.98,
    ("8 B", "exposed communication"): 0.7,
    ("8 B", "peak"): 0.92,
    ("small", "step"): 0.65,
}


@dataclass(frozen=True, slots=True)
class Found:
    """One system in one setting, in its last step."""

    system: str
    step_ms: float
    exposed_ms: float
    idle_ms: float
    host_ms: float
    peak_gib: float
    host_waits: int


def measure(conditions: Conditions) -> Figure:
    """All settings, one system after the other."""
    rows, samples, notes = [], {}, ["simulated: no time was measured on hardware"]
    for setting in QUICK if conditions.quick else SETTINGS:
        if conditions.cases and setting.case.name not in conditions.cases:
            continue
        results = []
        for system in setting.systems:
            try:
                results.append(in_a_process(simulated, system, setting))
            except Exception as error:  # a system that cannot do this is a note
                notes.append(f"{setting.title}: {system.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            print(f"\n  {setting.title}: {results[-1]}", end="", file=sys.stderr, flush=True)
        samples[setting.title] = results
        rows += rows_of(setting, results)
    return Figure(rows, samples, notes, all(samples.values()))


def in_a_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what `work` returns in a process of its own, which has one group, one clock and one peak of memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def simulated(system: System, setting: Setting) -> Found:
    """One system in one setting, in this process, which is rank 0."""
    import simdevice
    from simdevice import machines

    torch.set_num_threads(1)
    simdevice.load()
    record = {**machines.read(MACHINE), "python": PYTHON}
    simdevice.configure(machine=record, compute=False, races="off")
    simdevice.imagine_ranks(setting.num_ranks)
    training = Training(system, setting.case, setting.stack, setting.mesh())
    for number in range(STEPS):
        batches = training.batches(number)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        simdevice.host_waits()
        simdevice.reset_times()
        training.step(batches)
    times, waits = simdevice.times(), simdevice.host_waits()
    return Found(
        system.name,
        step_ms=times.end / 1e3,
        exposed_ms=times.exposed / 1e3,
        idle_ms=times.idle / 1e3,
        host_ms=times.host / 1e3,
        peak_gib=torch.accelerator.max_memory_allocated() / 2**30,
        host_waits=sum(waits.values()),
    )


def rows_of(setting: Setting, results: list[Found]) -> list[Row]:
    """A row for each of what was found, with the ratios to torch's. That of the peak says what would not fit."""
    rows = []
    memory = read_cluster(MACHINE).device.memory / 2**30
    unfit = ", ".join(each.system for each in results if each.peak_gib > memory)
    for what, unit, field in (
        ("step", "ms", "step_ms"),
        ("exposed communication", "ms", "exposed_ms"),
        ("compute idle", "ms", "idle_ms"),
        ("host", "ms", "host_ms"),
        ("peak", "GiB", "peak_gib"),
        ("host waits", "", "host_waits"),
    ):
        values = {each.system: float(getattr(each, field)) for each in results}
        ratios = {
            name: values[name] / values[rival]
            for name, rival in RIVALS.items()
            if name in values and values.get(rival) and what != "host waits"
        }
        limit = AIMS.get((setting.stack.name, what)) if setting.case is PLAIN else None
        remark = f"above the {memory:.1f} GiB of {MACHINE}: {unfit}" if unfit and what == "peak" else ""
        rows.append(Row(f"{setting.title}: {what}", unit, values, ratios, aim=limit and Aim(limit), remark=remark))
    return rows
