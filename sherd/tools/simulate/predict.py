"""The prediction of a step on a cluster: time, memory as the device sees it, bytes on each link, and the price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.costs import ClusterCosts, flops_in
from sherd.tools.simulate.play import Stage, begins, pass_seconds, play
from sherd.tools.simulate.reserved import Reserved, reserved_roughly
from sherd.tools.simulate.saved import SavedCopy
from sherd.tools.simulate.search import Outcome
from sherd.tools.simulate.segments import ModelCollective, OptimizerPart, Part
from sherd.tools.simulate.settings import Mesh
from sherd.tools.simulate.sharded import AND_BACK, Sharded
from sherd.tools.simulate.timeline import Lane, Timeline
from sherd.tools.simulate.work import Collective, RankGroup, Work


@dataclass(frozen=True)
class Prediction:
    """A step of one rank on a cluster.

    Attributes:
        timeline: the spans and bytes over time. Its peak is of bytes alive at once.
        reserved_bytes: the bytes that the caching allocator takes from the driver, about.
        driver_bytes: the bytes taken of the device: the reserved ones, and those of the driver and libraries.
        flops: the model's FLOP on this rank, without recomputation in activation checkpointing.
        tokens_per_second: the tokens of all ranks; 0 if the model reads no tokens.
        samples_per_second: the samples of all ranks.
        mfu: `flops` as a share of the device's peak FLOP/s, in the dtype of most of the matrix products (`flops_in`).
        sent: bytes that the rank sends in the step, by the kind of link that they go over: the mean of all ranks.
        in_host: the bytes that a rank takes of its node's own memory, by kind: with offload, and on a CPU.
        on_disk: the bytes that it takes of a disk.
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
    in_host: Mapping[str, int] = field(default_factory=dict)
    on_disk: int = 0

    @property
    def host_bytes(self) -> int:
        return sum(self.in_host.values())

    @property
    def ranks_of_node(self) -> int:
        return min(self.mesh.num_ranks, self.cluster.devices_per_node)

    @property
    def outcome(self) -> Outcome:
        """The seconds of a step, and the bytes of a device and of a node: figures that settings are compared by."""
        return Outcome(self.timeline.seconds, self.driver_bytes, self.ranks_of_node * self.host_bytes)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the cluster's currency; None without a price or tokens."""
        return self._cost_per_million(self.tokens_per_second)

    @property
    def cost_per_million_samples(self) -> float | None:
        """In the cluster's currency; None without a price."""
        return self._cost_per_million(self.samples_per_second)

    def _cost_per_million(self, per_second: float) -> float | None:
        price = self.cluster.price_per_hour
        return price * self.mesh.num_ranks / 3600 / per_second * 1e6 if price is not None and per_second else None

    def days(self, tokens: float) -> float:
        """Returns the days of a run over so many tokens, if nothing stops it."""
        return tokens / self.tokens_per_second / 86400

    def price(self, tokens: float) -> float | None:
        """Returns the price of a run over so many tokens; None if the price of a device is not known."""
        per_hour = self.cluster.price_per_hour
        return None if per_hour is None else per_hour * self.mesh.num_ranks * 24 * self.days(tokens)

    def lasting(self, seconds: float, times: float = 1.0) -> Prediction:
        """Returns the prediction of a step that lasts `seconds`, as another rank needs, with `times` as much work."""
        share = times * self.timeline.seconds / seconds
        return replace(
            self,
            timeline=replace(self.timeline, seconds=seconds),
            flops=round(self.flops * times),
            tokens_per_second=self.tokens_per_second * share,
            samples_per_second=self.samples_per_second * share,
            mfu=self.mfu * share,
        )

    def continued(self, before: Prediction, num: int, more: int) -> Prediction:
        """Returns the prediction of a step with `more` micro-batches than the `num` of this step.

        Each adds the difference to the step `before`, which has one micro-batch less. The spans stay the same.
        """

        def beyond(less: float, now: float) -> float:
            return now + more * (now - less)

        timeline, earlier = self.timeline, before.timeline
        waits = {lane: beyond(earlier.exposed.get(lane, 0.0), each) for lane, each in timeline.exposed.items()}
        longer = self.lasting(beyond(earlier.seconds, timeline.seconds), (num + more) / num)
        return replace(
            longer,
            timeline=replace(longer.timeline, exposed=waits),
            reserved_bytes=round(beyond(before.reserved_bytes, self.reserved_bytes)),
            driver_bytes=round(beyond(before.driver_bytes, self.driver_bytes)),
            in_host={kind: round(beyond(before.in_host.get(kind, 0), each)) for kind, each in self.in_host.items()},
            sent={link: round(beyond(before.sent.get(link, 0), each)) for link, each in self.sent.items()},
        )


@dataclass(frozen=True)
class RankWork:
    """The work of a rank: its micro-batch, also in parts, the sharded model, its step of matrices, its stage if any."""

    work: Work
    sharded: Sharded
    parts: Sequence[Part]
    matrices: Sequence[OptimizerPart] = ()
    stage: Stage | None = None


def predict_pipeline(
    first: RankWork,
    last: RankWork,
    cluster: Cluster,
    mesh: Mesh,
    *,
    micro_batches: int,
    has_holes: bool = True,
    title: str = "",
) -> Prediction:
    """Returns the prediction of a pipeline's step on the stage that takes the most memory.

    That is the first stage, which has the most micro-batches under way, or the last stage, which has the logits. All
    stages but the last one are like the first.
    """
    costs = ClusterCosts(cluster)
    assert first.stage is not None and last.stage is not None, "both are in the pipeline"
    of_first, of_last = (
        pass_seconds(rank.parts, rank.sharded, costs, stage)
        for rank, stage in ((first, first.stage), (last, last.stage))
    )
    send = costs.collective("send", first.stage.sent, first.stage.pair)
    times = begins([of_first] * (mesh.pp - 1) + [of_last], micro_batches, send)
    ranks = (
        replace(first, stage=replace(first.stage, begins=times[0])),
        replace(last, stage=replace(last.stage, begins=times[-1])),
    )
    of_ranks = [
        predict(each, cluster, mesh, micro_batches=micro_batches, has_holes=has_holes, title=title) for each in ranks
    ]
    seconds = max(each.timeline.seconds for each in of_ranks)
    largest = max(of_ranks, key=lambda each: each.driver_bytes).lasting(seconds)
    flops = ((mesh.pp - 1) * of_ranks[0].flops + of_ranks[1].flops) // mesh.pp  # the mean of all stages
    most = max(of_ranks, key=lambda each: each.host_bytes)
    mfu = largest.mfu * flops / largest.flops
    return replace(largest, flops=flops, mfu=mfu, in_host=most.in_host, on_disk=most.on_disk)


def predict(
    rank: RankWork,
    cluster: Cluster,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    reduces_each: bool = True,
    has_holes: bool = True,
    title: str = "",
    steps_in_backward: bool = False,
) -> Prediction:
    """Returns the prediction of a step; see `play`. `has_holes` simulates the holes in the allocator's pools."""
    work, costs, device = rank.work, ClusterCosts(cluster), cluster.device
    units, has_lanes = rank.sharded.units, device.overlaps
    reserved = Reserved(units, device.memory - device.library_bytes) if has_lanes and has_holes else None
    timeline = play(
        rank.parts,
        rank.sharded,
        costs,
        matrices=rank.matrices,
        micro_batches=micro_batches,
        reduces_each=reduces_each,
        stage=rank.stage,
        reserved=reserved,
        title=title,
        steps_in_backward=steps_in_backward,
    )
    seconds = timeline.seconds
    flops = micro_batches * work.flops
    tokens, samples = (micro_batches * mesh.num_data * each / seconds for each in (work.tokens, work.samples))
    if reserved is not None:
        nbytes = reserved.allocator.most_reserved
    else:
        nbytes = reserved_roughly(timeline.changes, units) if has_lanes else timeline.peak.nbytes
    num_reductions = micro_batches if rank.stage is None else 1
    saved = [size for part in rank.parts if isinstance(part, SavedCopy) and part.to_host for size in part.sizes]
    in_host, on_disk = rank.sharded.elsewhere(num_reductions, steps_in_backward, saved)
    return Prediction(
        cluster,
        mesh,
        timeline,
        nbytes,
        nbytes + device.library_bytes,
        flops,
        tokens,
        samples,
        flops / seconds / flops_in(work.dtype, device.peak_flops),
        _sent(timeline, rank, costs),
        in_host if has_lanes else {"tensors and libraries": nbytes + device.library_bytes},
        on_disk,
    )


def _sent(timeline: Timeline, rank: RankWork, costs: ClusterCosts) -> dict[str, int]:
    """Returns the bytes that a rank sends in the collectives of a step, by the links that they go over."""
    groups: dict[tuple[Lane, int], list[tuple[RankGroup, str]]] = {}
    for number, unit in enumerate(rank.sharded.units):
        for each in unit.traffic:
            groups.setdefault((Lane.GATHER, number), []).extend([(each.shard, "gather")] * (each.gathered > 0))
            groups.setdefault((Lane.REDUCE, number), []).extend([(each.shard, each.reduced_by)] * (each.reduced > 0))
            summed = [(each.replicate, each.all_reduced_by)] * (each.all_reduced > 0)
            groups.setdefault((Lane.ALL_REDUCE, number), []).extend(summed)
    if not costs.overlaps:  # collectives of a unit between the same ranks run together
        groups = {key: [*dict.fromkeys(each)] for key, each in groups.items()}
    for part in rank.parts:
        if isinstance(part, ModelCollective) and part.collective.group.size > 1:
            called = part.collective.group, part.collective.kind
            groups.setdefault((Lane.MODEL, part.unit), []).append(called)
    groups[Lane.MATRICES, -1] = [(part.group, part.kind) for part in rank.matrices if isinstance(part, Collective)]
    in_turn = {key: cycle(each) for key, each in groups.items()}  # the order in which collectives are queued
    sent: defaultdict[str, float] = defaultdict(float)

    def add(kind: str, nbytes: float, group: RankGroup) -> None:
        for link, share in costs.links(kind, group).items():
            sent[link] += share * nbytes

    for span in timeline.spans:
        if span.lane in (Lane.COPY, Lane.BACK):
            sent["to the host" if span.lane is Lane.BACK else "from the host"] += span.nbytes
        elif span.name == "send" and rank.stage is not None:
            add(span.name, span.nbytes, rank.stage.pair)
        elif (span.lane, span.unit) in in_turn:
            group, kind = next(in_turn[span.lane, span.unit])
            nbytes = span.nbytes * (group.size - 1) // group.size
            for way in {"all-reduce": ("all-reduce",) * 2, AND_BACK: ("all-to-all", "all-gather")}.get(kind, (kind,)):
                add(way, nbytes, group)
    return {link: round(nbytes) for link, nbytes in sent.items()}
