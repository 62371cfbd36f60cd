"""Seconds of operations, collectives and optimizer steps on a cluster, by closed formulas: rooflines and alpha-beta.

An operation takes the longer of its computing and its reading and writing, plus `launch`. So small operations are slow
as in Hockney's model (The science of computer benchmarking, 1996): if large products run at a rate r, a product of w
FLOP runs at r * w / (w + r * launch), at half of r if w = r * launch.

Collectives (p ranks, n bytes; Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005) are those that NCCL chooses, as its tuning model has them (src/graph/tuning.cc):

    ring      all-gather, reduce-scatter   p - 1 steps, (p - 1) / p * n bytes; all-reduce: twice both
    tree      all-reduce                   2 * (a chain within the node + log2 of the nodes), 2 * n bytes
    PAT       all-gather, reduce-scatter   log2 p steps, where each rank is alone on its node (NCCL 2.23)
    chain     broadcast                    p - 1 steps, n bytes
    pairs     all-to-all                   p - 1 steps, n / p bytes each

They are hierarchical: steps within a node take the latency of `within`, steps from node to node that of `across`. A
ring runs through each device of a node, so all of them share the traffic across; the slower link is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import dist, exp, log, sqrt

from sherd.tools.simulate.cluster import Cluster, Device, Link, Timed
from sherd.tools.simulate.sharded import AND_BACK, Touched
from sherd.tools.simulate.work import Op, OpKind, RankGroup

WITHIN, ACROSS = "within nodes", "across nodes"
"""The links between ranks, in words."""
NEAREST = 4
"""This many timed operations, the nearest in size, say what another operation takes."""
SAME = 0.01
"""A timed operation whose sizes differ by no more than this, in logarithms, says it alone: it is of the same model."""


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """A process group on nodes: its `size`, and the number of ranks that share a node (the last may have fewer)."""

    size: int
    per_node: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_node <= self.size, f"1 <= per_node <= size: {self}"

    @classmethod
    def of(cls, group: RankGroup, devices_per_node: int) -> NodeRanks:
        """Returns `group` on nodes that ranks fill one after the other."""
        return cls(group.size, max(1, min(group.size, devices_per_node // group.stride)))


def op_seconds(op: Op, device: Device) -> float:
    """Returns the seconds of `op` on `device`, without the host's time to queue it."""
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
    """Returns the figure for `dtype`. float16 without one has that of bfloat16, another dtype that of float32."""
    return flops.get(dtype) or flops["bfloat16" if dtype == "float16" else "float32"]


def _seconds_like(op: Op, timed: Sequence[Timed], device: Device) -> float:
    """Returns the seconds of `op` if it is as much slower than `plain` as the nearest timed operations are.

    Near are operations with about as many FLOP per byte, sums as deep, and then about the same size.
    """

    def plain(each: Op | Timed) -> float:
        return device.launch + each.flops / flops_in(op.dtype, device.flops) + each.nbytes / device.bandwidth

    def sizes(each: Op | Timed) -> tuple[float, ...]:
        flops, nbytes, depth = (log(max(1, size)) for size in (each.flops, each.nbytes, each.depth))
        return (3 * (flops - nbytes), 3 * depth, 0.3 * flops)

    at = sizes(op)
    near = nsmallest(NEAREST, ((dist(at, sizes(each)), log(each.seconds / plain(each))) for each in timed))
    if near[0][0] < SAME:
        near = near[:1]
    weights = [1 / (distance**2 + 1e-3) for distance, _ in near]
    slower = sum(weight * factor for weight, (_, factor) in zip(weights, near, strict=True)) / sum(weights)
    return plain(op) * exp(slower)


def waited(computed: float, skew: float) -> float:
    """Returns the seconds for which ranks wait for the slowest, after computing for `computed` seconds."""
    # They are `skew` after 1 ms, and grow with the root of time, like the sum of many small delays.
    return skew * sqrt(computed * 1e3)


def collective_seconds(kind: str, nbytes: int, ranks: NodeRanks, cluster: Cluster) -> float:
    """Returns the seconds of a collective; 0 for one rank.

    Args:
        kind: all-gather, reduce-scatter, all-reduce, broadcast, all-to-all, send or `AND_BACK`.
        nbytes: the bytes of the full tensor: the result of an all-gather, the input of a reduce-scatter, the input of
            an all-to-all with this rank's own part.
        ranks: the ranks that take part. A send is between two; per_node = 1 if they are on two nodes.
        cluster: the links between the ranks.
    """
    if ranks.size == 1:
        return 0.0
    if kind == AND_BACK:
        return sum(collective_seconds(each, nbytes, ranks, cluster) for each in ("all-to-all", "all-gather"))
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


class ClusterCosts:
    """The seconds of work on a rank of `cluster`, whose nodes are filled one after the other.

    Attributes:
        overlaps: collectives overlap with compute.
        host: seconds of the host to queue one operation or collective.
        beside: the share of its speed that compute keeps while a collective runs.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.overlaps, self.host, self.beside = cluster.device.overlaps, cluster.device.host, cluster.device.beside
        self._seconds_of: dict[tuple[str, int, RankGroup], float] = {}

    def op(self, op: Op) -> float:
        return op_seconds(op, self._cluster.device)

    def copied(self, nbytes: int) -> float:
        """Returns the seconds of reading or writing `nbytes` in the memory of the device."""
        device = self._cluster.device
        return device.launch + nbytes / (device.bandwidth * device.shares.get(OpKind.COPY, 1.0))

    def touched(self, operations: Touched) -> float:
        """Returns the seconds of element-wise operations."""
        device = self._cluster.device
        bandwidth = device.bandwidth * device.shares.get(OpKind.POINTWISE, 1.0)
        return operations.num_ops * device.launch + operations.nbytes / bandwidth

    def collective(self, kind: str, nbytes: int, group: RankGroup) -> float:
        """Returns the seconds of a collective; see `collective_seconds`."""
        seconds = self._seconds_of.get((kind, nbytes, group))
        if seconds is None:  # a model has many units of equal sizes
            seconds = collective_seconds(kind, nbytes, self._ranks(group), self._cluster)
            self._seconds_of[kind, nbytes, group] = seconds
        return seconds

    def waited(self, computed: float) -> float:
        """Returns the seconds for which ranks wait for the slowest, after computing for `computed` seconds."""
        return waited(computed, self._cluster.device.skew)

    def to_host(self, nbytes: int, on_disk: bool = False) -> float:
        """Returns the seconds of `nbytes` from the device to its host, or through it to a disk."""
        return self._to_rest(self._cluster.to_host, nbytes, on_disk)

    def from_host(self, nbytes: int, on_disk: bool = False) -> float:
        """Returns the seconds of `nbytes` from the host, or from a disk, to the device."""
        return self._to_rest(self._cluster.from_host or self._cluster.to_host, nbytes, on_disk)

    def _to_rest(self, link: Link, nbytes: int, on_disk: bool) -> float:
        links = [link, *[self._cluster.disk or link] * on_disk]  # chunks go on from one to the other meanwhile
        return max(each.latency + nbytes / each.bandwidth for each in links)

    def optimizer(self, nbytes: int, num_tensors: int, on_host: bool) -> float:
        """Returns the seconds of an optimizer step with `num_tensors` reads or writes, of `nbytes` in all."""
        link = self._cluster.optimizer
        if link and not on_host:
            return num_tensors * link.latency + nbytes / link.bandwidth
        if not on_host:
            return self.copied(nbytes)
        # Without a figure: a device's share of its host's memory is about as fast as the link between them.
        return nbytes / (self._cluster.host_bandwidth or self._cluster.to_host.bandwidth)

    def links(self, kind: str, group: RankGroup) -> dict[str, float]:
        """Returns the shares of what a rank of `group` sends in a collective that go over each kind of link.

        It is the mean of all ranks: of a ring that goes through a node, one rank sends to the next node.
        """
        ranks = self._ranks(group)
        num_nodes = -(-ranks.size // ranks.per_node)
        if num_nodes == 1:
            return {WITHIN: 1.0}
        far = (ranks.size - ranks.per_node) / (ranks.size - 1) if kind == "all-to-all" else num_nodes / ranks.size
        return {WITHIN: 1 - far, ACROSS: far} if far < 1 else {ACROSS: 1.0}

    def _ranks(self, group: RankGroup) -> NodeRanks:
        return NodeRanks.of(group, self._cluster.devices_per_node)
