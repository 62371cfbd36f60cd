"""What plans of CPU ranks need beyond what `sherd doctor --bandwidth` measures: small models train, and are timed.

Operations take what the same ones took, collectives what they took with all that the engine does around them, and ranks
wait for the slowest (docs/decisions/035-ranks-wait-for-the-slowest.md).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard
from sherd.comm.objects import all_gather_objects
from sherd.policy import CommPolicy
from sherd.tools.doctor.bandwidth import line_through
from sherd.tools.doctor.ranks import device, seconds_of, slowest
from sherd.tools.simulate.cluster import Cluster, Link
from sherd.tools.simulate.costs import waited
from sherd.tools.simulate.sharded import OPTIMIZERS

from .operations import timed_operations, usual_steps

STEPS_S, LEAST_TURNS = 6.0, 9  # the seconds and least number of turns of models that are compared
# The widths of units with a square weight each, and the number of inputs that take much compute between two
# collectives: 5 to 15 ms on a server's core.
WIDTHS = {64: 2**20, 128: 2**20, 512: 2**20, 1024: 2**18, 2048: 2**18}
FEW = 2**14  # the number of inputs that take little compute
UNITS, VECTORS = 8, 7  # the number of units, and of the vectors in each unit


def calibrated(cluster: Cluster, transports: Sequence[str]) -> list[Cluster]:
    """Returns `cluster`, as these ranks of one host have measured it, with timed operations, for each transport."""
    timed, found = timed_operations(usual_steps()), []
    for transport in transports:
        together = measured_together(cluster.device.launch, transport)
        within = Link(together.within.latency, min(together.within.bandwidth, cluster.device.bandwidth))
        there = replace(cluster.device, skew=together.skew, timed=timed)
        found.append(replace(cluster, device=there, within=within, optimizer=together.optimizer))
    return found


class _Unit(nn.Module):
    """A product with a square weight, and with vectors, as a block's biases and norms are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(VECTORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        for vector in self.vectors:
            x = x * vector
        return x


@dataclass(frozen=True, slots=True)
class Together:
    """Figures of CPU ranks that train together: a cluster's links `within` and `optimizer`, and its device's `skew`."""

    within: Link
    optimizer: Link
    skew: float


def measured_together(launch: float, transport: str = "auto") -> Together:
    """Times small trainings on CPU ranks of one host, beside the same trainings on each rank alone.

    Returns the cost of a unit's collectives, two gathers and one reduction with all that the engine does around them;
    how this cost grows with the compute in between, since ranks wait for the slowest; and the cost of AdamW's step.
    Lower quartiles count, which leaves out most other load on the machine.
    """
    soon, late, adamw, ranks = [], [], [], dist.get_world_size()
    for width, many in WIDTHS.items():
        plain = nn.Sequential(*(_Unit(width) for _ in range(UNITS)))
        sharded = copy.deepcopy(plain)
        for unit in (*sharded, sharded):
            fully_shard(unit, comm_policy=CommPolicy(transport))
        batches = [torch.randn(inputs // width, width) for inputs in (FEW, many)]
        steps = [partial(_train, model, batch) for batch in batches for model in (plain, sharded)]
        # A unit has three collectives.
        few_alone, few_sharded, many_alone, many_sharded = (seconds / (3 * UNITS) for seconds in _in_turns(steps))
        soon.append((few_alone, few_sharded - few_alone))
        late.append((many_alone, many_sharded - many_alone))
        weights = [parameter for parameter in sharded.parameters() if parameter.dim() > 1]
        adamw.append(slowest(torch.optim.AdamW(weights, foreach=True).step, device()) / UNITS)
    skew = _skew(soon, late)
    took = [max(1e-6, seconds - waited(computed, skew)) for computed, seconds in soon]
    sizes, accesses = [4 * width**2 for width in WIDTHS], OPTIMIZERS["adamw"].accesses
    within = line_through([(ranks - 1) / ranks * size for size in sizes], took, launch, ranks - 1)
    optimizer = line_through([accesses * size / ranks for size in sizes], adamw, steps=accesses)
    return Together(within, optimizer, skew)


def _skew(soon: Sequence[tuple[float, float]], late: Sequence[tuple[float, float]]) -> float:
    """Returns the skew by which equal collectives take longer after much compute (`late`) than after little (`soon`).

    A collective is the seconds of compute before it, and its own.
    """
    pairs = zip(soon, late, strict=True)
    return max(0.0, median((b - a) / (waited(after, 1.0) - waited(before, 1.0)) for (before, a), (after, b) in pairs))


def _train(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).sum().backward()


def _in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the seconds of each of `calls`: the lower quartile of the slowest rank's times.

    The calls run in turns, so that load on the machine affects all of them alike.
    """
    begin = time.perf_counter()
    for call in calls:
        call()
    once: float = max(all_gather_objects(time.perf_counter() - begin, "times"))
    mine = []
    for _ in range(min(max(LEAST_TURNS, int(STEPS_S / once)), 1000)):
        for call in calls:
            dist.barrier()
            mine.append(seconds_of(call, device()))
    slowest = [*map(max, *all_gather_objects(mine, "times"), [0.0] * len(mine))]
    runs = [slowest[number :: len(calls)] for number in range(len(calls))]
    return [quantiles(times, n=4, method="inclusive")[0] for times in runs]
