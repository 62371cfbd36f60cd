"""What sharding costs ranks on CPUs, measured by training: the collectives of units with all that the engine does
around them, and a step of the optimizer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from statistics import linear_regression

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.fully_shard import fully_shard
from sherd.comm.objects import all_gather_objects
from sherd.policy import CommPolicy
from sherd.simulate.cluster import Link
from sherd.simulate.sharded import OPTIMIZERS

WIDTHS = (64, 128, 512, 1024)  # of units with a square weight
UNITS, REPEATED = 8, 9
COLLECTIVES = 3  # of a unit in a step: two all-gathers and a reduce-scatter


def measured_units(launch: float, transport: str = "auto") -> tuple[Link, Link]:
    """Returns the links `within` and `optimizer` of a cluster whose operations take `launch`. All ranks come here.

    The shortest run counts, and of what it takes on each rank the longest.
    """
    collectives, steps, sizes = [], [], [4 * width**2 for width in WIDTHS]
    for width in WIDTHS:
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(UNITS)))
        model, batch = copy.deepcopy(plain), torch.ones(4, width)
        for unit in (*model, model):
            fully_shard(unit, comm_policy=CommPolicy(transport))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        took: list[list[float]] = []
        for _ in range(REPEATED):
            calls = (lambda: plain(batch).sum().backward(), lambda: model(batch).sum().backward(), optimizer.step)
            took.append([_seconds(call) for call in calls])
            optimizer.zero_grad()
            plain.zero_grad()
        told = all_gather_objects([min(each) for each in zip(*took, strict=True)], "the times of units")
        alone, sharded, stepped = (max(each) for each in zip(*told, strict=True))
        collectives.append(max(1e-6, sharded - alone) / (COLLECTIVES * UNITS))
        steps.append(stepped / UNITS)
    ranks, accesses = dist.get_world_size(), OPTIMIZERS["adamw"].accesses
    each = _line([(ranks - 1) / ranks * size for size in sizes], collectives)
    latency = max(1e-9, each.latency - launch) / (ranks - 1)
    return Link(latency, each.bandwidth), _line([accesses * size / ranks for size in sizes], steps)


def _seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of one run, which all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _line(sizes: Sequence[float], took: Sequence[float]) -> Link:
    """Returns latency and bandwidth by least squares, where a byte counts."""
    rates = [seconds / size for size, seconds in zip(sizes, took, strict=True)]
    fixed, per_byte = linear_regression([1 / size for size in sizes], rates)
    return Link(max(fixed, 1e-9), 1 / max(per_byte, min(rates) / 10))
