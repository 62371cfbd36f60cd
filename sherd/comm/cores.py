"""The cores for steps on the host: each rank's part of them, on the NUMA node of the rank's accelerator."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_DEVICES, _NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")


def own_cores() -> set[int]:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def node_of(device: torch.device) -> int | None:
    """Returns the NUMA node that an accelerator is on; None where the system or the accelerator does not say."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((_DEVICES / bus / "numa_node").read_text())
    except (AttributeError, AssertionError, OSError, RuntimeError, ValueError):
        return None
    return node if node >= 0 else None


def cores_near(device: torch.device) -> set[int]:
    """Returns those of this process' cores that are on the NUMA node of a device; all where that is not known."""
    node, own = node_of(device), own_cores()
    try:
        listed = "" if node is None else (_NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        listed = ""
    ends = [list(map(int, each.split("-"))) for each in listed.split(",") if each]  # as 0-31,64-95
    return own & {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)} or own


def threads_of_steps(num_ranks: int) -> int:
    """Returns how many threads compute a step of one of the `num_ranks` of this host.

    It is what the user has set, else an equal share of the cores. torchrun sets OMP_NUM_THREADS=1 where the user has
    set nothing, which would leave the host's memory idle.
    """
    own, every = len(own_cores()), os.cpu_count() or 1
    share = own if own <= every // num_ranks else max(1, own // num_ranks)  # a launcher may have bound each rank
    given, now = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    if given == "1" == str(now) and num_ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        return share
    return now if given else min(share, now)
