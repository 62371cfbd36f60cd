"""What the host takes for a Python call, from host times that were measured on one H200.

    python -m bench.device.host_calls      # counts the steps of docs/understand/benchmarks.csv here, and compares

Each step is taken again on the simulated device, over the same fake group, and its Python calls, launches and events
are counted. In one case two systems differ in these alone, so each system and FSDP2 are a pair that tells what a call
takes, and the median of the pairs is the answer, as far as their spread allows one. FSDP1 is left out, whose host waits
for the device in a loop, and so are cases where a CPU steps or torch compiles.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from statistics import quantiles
from typing import NamedTuple

import torch

from ..pages import DOCS
from ..ranks import Place, joined
from ..systems import FLAT, FSDP2, SHERD, SHERD_COALESCED, WRAPPER, WRAPPER_FLAT, System
from .cases import CASES, LARGE, Case, Stack
from .simulated import in_a_process
from .training import Training

MEASURED = DOCS / "understand/benchmarks.csv"
SYSTEMS = (FSDP2, SHERD, SHERD_COALESCED, FLAT, WRAPPER, WRAPPER_FLAT)
COUNTED = ("plain", "mixed", "recompute", "accumulate")
SECONDS = {"host": 1e3, "python": 1e-3}
"""Of a launch and of a call, so large that the clock's time of the host is a sum from which all counts can be read."""


class Counts(NamedTuple):
    """Of one step."""

    calls: int
    launches: int
    events: int


def measured_ms() -> dict[tuple[int, str], dict[str, float]]:
    """Returns the host's milliseconds of a step, by ranks and case, and then by system."""
    with MEASURED.open(newline="") as file:
        return {
            (int(line["ranks"].split()[0]), case): {
                each.name: float(line[each.name]) for each in SYSTEMS if line[each.name]
            }
            for line in csv.DictReader(file)
            for case in COUNTED
            if line["figure"] == f"{case}: host"
        }


def counted(system: System, case: Case, num_ranks: int, stack: Stack = LARGE) -> Counts:
    """Returns what a step on rank 0 of a fake group asks of the host; in a process of its own."""
    with joined(Place("sim", "fake", num_ranks, load="simdevice:load")) as mesh:
        import simdevice
        from simdevice import machines

        simdevice.configure(machine={**machines.read("h200"), **SECONDS}, compute=False, races="off")
        training = Training(system, case, stack, mesh)
        for number in range(3):
            batches = training.batches(number)
            torch.accelerator.synchronize()
            simdevice.reset_times()
            training.step(batches)
        microseconds = round(simdevice.times().host)
    launches, rest = divmod(microseconds, round(1e6 * SECONDS["host"]))
    calls, events = divmod(rest, round(1e6 * SECONDS["python"]))
    return Counts(calls, launches, events)


def microseconds_of_a_call(ms: Mapping[str, float], counts: Mapping[str, Counts], launch: float) -> dict[str, float]:
    """Returns, by system, the microseconds per Python call by which its step differs from FSDP2's of the same case.

    What torch's operators take is in both alike, and so goes out. A launch takes `launch` microseconds, an event 1.
    """
    rest = {}
    for name, (_, launches, events) in counts.items():
        rest[name] = 1e3 * ms[name] - launch * launches - events
    rival = FSDP2.name
    return {
        name: (rest[rival] - rest[name]) / (counts[rival].calls - counts[name].calls) for name in rest if name != rival
    }


def main() -> int:
    from simdevice import machines

    launch = 1e6 * machines.record("h200")["host"]
    systems = {system.name: system for system in SYSTEMS}
    found: list[float] = []
    for (num_ranks, case), ms in measured_ms().items():
        counts = {}
        for name in ms:
            counts[name] = in_a_process(counted, systems[name], CASES[case], num_ranks)
        pairs = microseconds_of_a_call(ms, counts, launch)
        found += pairs.values()
        print(f"{num_ranks} fake ranks, {case}")
        for name, count in counts.items():
            print(f"  {name}: {ms[name]:.1f} ms, {count}, {pairs.get(name, 0):.2f} us a call", flush=True)
    low, middle, high = quantiles(found, n=4)
    print(f"{middle:.2f} us a call, {low:.2f} to {high:.2f} in the middle half of {len(found)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
