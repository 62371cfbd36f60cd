"""Seconds of operations, collectives and optimizer steps on a cluster, by closed formulas: rooflines and alpha-beta.

An operation takes the longer of its computing and its reading and writing, and `launch` besides. So small ones are slow
as Hockney has it (The science of computer benchmarking, 1996): where large products run at a rate r, one of w FLOP runs
at r * w / (w + r * launch), at half of r if w = r * launch.

Collectives (p ranks, n bytes; Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005) are those that NCCL chooses, as its tuning model has them (src/graph/tuning.cc):

    ring      all-gather, reduce-scatter   p - 1 steps, (p - 1) / p * n bytes; all-reduce: twice both
    tree      all-reduce                   2 * (a chain within the node + log2 of the nodes), 2 * n bytes
    PAT       all-gather, reduce-scatter   log2 p steps, where each rank is alone on its node (NCCL 2.23)
    chain     broadcast                    p - 1 steps, n bytes
    pairs     all-to-all                   p - 1 steps, n / p bytes each

They are hierarchical: steps within a node take the latency of `within`, those from node to node that of `across`. A
ring runs through each device of a node, so all of them share what goes across; the slower of both ways is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import dist, exp, log, sqrt

from sherd.tools.simulate.cluster import Cluster, Device, Timed
from sherd.tools.simulate.work import Group, Op, OpKind

NEAREST = 4
"""Of the operations that were timed so many that are nearest in size say what another one takes."""
SAME = 0.01
"""One whose sizes differ by no more than that, in logarithms, says it alone: it was timed in the same model."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group as it lies on nodes: its `size`, and how many ranks share a node (on the last maybe fewer)."""

    size: int
    per_node: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_node <= self.size, f"1 <= per_node <= size: {self}"

    @classmethod
    def of(cls, group: Group, devices_per_node: int) -> Ranks:
        """Returns `group` on nodes that ranks fill one after the other."""
        return cls(group.size, max(1, min(group.size, devices_per_node // group.stride)))


def op_seconds(op: Op, device: Device) -> float:
    """Returns the seconds that `op` takes on `device`, without the host's time to queue it. A dtype without a figure
    computes as float32, and float16 as bfloat16. Where operations of its name and dtype were timed, these decide."""
    timed = device.timed.get(f"{op.name.removeprefix('aten.')}.{op.dtype}")
    if timed:
        return _seconds_like(op, timed, device)
    moving = op.nbytes / (device.bandwidth * device.shares.get(op.kind, 1.0))
    if op.kind not in (OpKind.MATMUL, OpKind.ATTENTION):
        return device.launch + moving
    flops = flops_in(op.dtype, device.flops)
    flops *= device.attention_share if op.kind is OpKind.ATTENTION else 1.0
    return device.launch + max(moving, op.computed * op.flops / flops)


def flops_in(dtype: str, flops: Mapping[str, float]) -> float:
    """Returns what `flops`, by dtypes, say of `dtype`. One without a figure is as float32, and float16 as bfloat16."""
    return flops.get(dtype) or flops["bfloat16" if dtype == "float16" else "float32"]


def _seconds_like(op: Op, timed: Sequence[Timed], device: Device) -> float:
    """Returns what `op` takes if it is as much slower than computing and moving one after the other as the nearest
    ones that were timed are. Near is what has about as many FLOP per byte, sums as deep, and then is about as large."""

    def plain(each: Op | Timed) -> float:
        return device.launch + each.flops / flops_in(op.dtype, device.flops) + each.nbytes / device.bandwidth

    def sizes(each: Op | Timed) -> tuple[float, ...]:
        flops, nbytes, depth = (log(max(1, size)) for size in (each.flops, each.nbytes, each.depth))
        return (3 * (flops - nbytes), 3 * depth, 0.3 * flops)

    at = sizes(op)
    near = nsmallest(NEAREST, ((dist(at, sizes(each)), log(each.seconds / plain(each))) for each in timed))
    if near[0][0] < SAME:
        near = near[:1]
    weights = [1 / (apart**2 + 1e-3) for apart, _ in near]
    slower = sum(weight * by for weight, (_, by) in zip(weights, near, strict=True)) / sum(weights)
    return plain(op) * exp(slower)


def waited(computed: float, skew: float) -> float:
    """Returns the seconds in which ranks wait for the slowest after each has computed for so many: `skew` after 1 ms.
    They grow with the root of time, as the sum of many small delays does."""
    return skew * sqrt(computed * 1e3)


def collective_seconds(kind: str, nbytes: int, ranks: Ranks, cluster: Cluster) -> float:
    """Returns the seconds that a collective takes; 0 for one rank.

    Args:
        kind: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all or send.
        nbytes: of the whole tensor: what an all-gather leaves on each rank, what a reduce-scatter reads on each, what a
            rank sends in an all-to-all, its own part included.
        ranks: that take part. A send is between two; per_node = 1 if they are on two nodes.
    """
    if ranks.size == 1:
        return 0.0
    within, across, size, per_node = cluster.within, cluster.across, ranks.size, ranks.per_node
    node_hops = -(-size // per_node) - 1
    hops = node_hops * across.latency + (size - 1 - node_hops) * within.latency
    slowest = min([within.bandwidth] * (per_node > 1) + [per_node * across.bandwidth] * (node_hops > 0))
    ring = (size - 1) / size * nbytes / slowest
    levels = node_hops.bit_length()  # log2, rounded up
    if kind in ("all-gather", "reduce-scatter"):
        seconds = ring + (levels * across.latency if per_node == 1 else hops)
    elif kind == "all-reduce":
        tree = (per_node - 1) * within.latency + levels * across.latency + nbytes / slowest
        seconds = 2 * min(hops + ring, tree)
    elif kind == "all-to-all":
        near, far = per_node - 1, size - per_node
        per_byte = near / within.bandwidth + far / across.bandwidth
        seconds = near * within.latency + far * across.latency + nbytes / size * per_byte
    else:
        assert kind in ("broadcast", "send"), f"no collective: {kind}"
        seconds = hops + nbytes / slowest
    return cluster.device.launch + seconds
