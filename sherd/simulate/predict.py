"""The prediction of a step on a cluster: time, memory as the device sees it, bytes on each link, and the price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sherd.simulate.clock import Costs
from sherd.simulate.cluster import Cluster
from sherd.simulate.costs import Ranks, collective_seconds, op_seconds
from sherd.simulate.play import play
from sherd.simulate.reserved import reserved_bytes
from sherd.simulate.settings import Mesh
from sherd.simulate.sharded import Sharded
from sherd.simulate.stretches import Part, parts_of
from sherd.simulate.timeline import Lane, Timeline
from sherd.simulate.work import Enter, Leave, Op, OpKind, Work

MATMULS = (OpKind.MATMUL, OpKind.ATTENTION)


class ClusterCosts(Costs):
    """The costs on a rank of `mesh` on `cluster`, whose nodes are filled one after the other."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self._cluster = cluster
        self._shard = Ranks.strided(mesh.shard, 1, cluster.devices_per_node)
        self._replicate = Ranks.strided(mesh.replicate, mesh.shard, cluster.devices_per_node)
        self.overlaps, self.host = cluster.device.overlaps, cluster.device.host

    def op(self, op: Op) -> float:
        return op_seconds(op, self._cluster.device)

    def copied(self, nbytes: int) -> float:
        device = self._cluster.device
        return device.launch + nbytes / (device.bandwidth * device.shares.get(OpKind.COPY, 1.0))

    def all_gather(self, nbytes: int) -> float:
        return collective_seconds("all-gather", nbytes, self._shard, self._cluster)

    def reduce_scatter(self, nbytes: int) -> float:
        return collective_seconds("reduce-scatter", nbytes, self._shard, self._cluster)

    def all_reduce(self, nbytes: int) -> float:
        return collective_seconds("all-reduce", nbytes, self._replicate, self._cluster)

    def to_host(self, nbytes: int) -> float:
        link = self._cluster.to_host
        return link.latency + nbytes / link.bandwidth

    def optimizer(self, nbytes: int, num_tensors: int, on_host: bool) -> float:
        link = self._cluster.optimizer
        if link and not on_host:
            return num_tensors * link.latency + nbytes / link.bandwidth
        # A device's share of its host's memory is about as fast as its way there.
        return self.to_host(nbytes) if on_host else self.copied(nbytes)

    def sent(self, timeline: Timeline) -> dict[str, int]:
        """Returns the bytes that this rank sends in the collectives of a step, by the slowest link of their ring."""
        sent: Counter[str] = Counter()
        for span in timeline.spans:
            ranks = self._replicate if span.lane is Lane.ALL_REDUCE else self._shard
            if span.lane in (Lane.GATHER, Lane.REDUCE, Lane.ALL_REDUCE):
                times = 2 if span.lane is Lane.ALL_REDUCE else 1
                link = "within nodes" if ranks.per_node >= ranks.size else "across nodes"
                sent[link] += times * span.nbytes * (ranks.size - 1) // ranks.size
            elif span.lane is Lane.COPY:
                sent["to the host"] += span.nbytes
        return dict(sent)


@dataclass(frozen=True)
class Prediction:
    """A step on a cluster, of one rank.

    Attributes:
        timeline: what happens when. Its peak is of bytes alive at once.
        reserved_bytes: what the caching allocator takes from the driver, about.
        driver_bytes: what the device lacks: reserved, and what the driver and libraries take.
        flops: of the model on this rank, without what activation checkpointing computes again.
        tokens_per_second: of all ranks; 0 if the model reads no tokens.
        samples_per_second: of all ranks.
        mfu: the share of the device's peak FLOP/s, in the dtype of most of its matrix products, that `flops` are.
        sent: bytes that the rank sends in the step, by link.
        cost_per_million_tokens: in the cluster's currency; None without a price or tokens.
    """

    cluster: Cluster
    mesh: Mesh
    timeline: Timeline
    reserved_bytes: int
    driver_bytes: int
    flops: int
    tokens_per_second: float
    samples_per_second: float
    mfu: float
    sent: dict[str, int]
    cost_per_million_tokens: float | None


def predict(
    work: Work,
    sharded: Sharded,
    cluster: Cluster,
    mesh: Mesh,
    *,
    parts: Sequence[Part] | None = None,
    micro_batches: int = 1,
    reduces_each: bool = True,
    title: str = "",
) -> Prediction:
    """Returns the prediction of a step; see `play`. `parts`: those of `work`, if they are there already."""
    costs, device = ClusterCosts(cluster, mesh), cluster.device
    if parts is None:
        parts = parts_of(work, sharded, costs.op)
    timeline = play(parts, sharded, costs, micro_batches=micro_batches, reduces_each=reduces_each, title=title)
    seconds = timeline.seconds
    flops = micro_batches * _flops_once(work)
    tokens, samples = (micro_batches * mesh.num_ranks * each / seconds for each in (work.tokens, work.samples))
    hourly = cluster.price_per_hour
    reserved = reserved_bytes(timeline.changes, device.overlaps)
    return Prediction(
        cluster,
        mesh,
        timeline,
        reserved,
        reserved + device.library_bytes,
        flops,
        tokens,
        samples,
        flops / seconds / device.peak_flops[_dtype_of(work)],
        costs.sent(timeline),
        hourly * mesh.num_ranks / 3600 / tokens * 1e6 if hourly is not None and tokens else None,
    )


def _flops_once(work: Work) -> int:
    """Returns the floating-point operations of a micro-batch, without those of recomputation."""
    flops, num_again = 0, 0
    for event in work.events:
        match event:
            case Enter(again=True):
                num_again += 1
            case Leave(again=True):
                num_again -= 1
            case Op() if not num_again:
                flops += event.flops
            case _:
                pass
    return flops


def _dtype_of(work: Work) -> str:
    """Returns the dtype in which most of the matrix products are computed."""
    flops: Counter[str] = Counter()
    for event in work.events:
        if isinstance(event, Op):
            flops[event.dtype] += event.flops if event.kind in MATMULS else 0
    return flops.most_common(1)[0][0] if flops else "float32"
