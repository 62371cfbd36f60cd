"""A prediction says what its parts say: time, memory as the device sees it, bytes on links, tokens and price."""

from dataclasses import replace

import pytest

from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.costs import ClusterCosts, NodeRanks, collective_seconds
from sherd.tools.simulate.predict import RankWork, predict
from sherd.tools.simulate.segments import parts_of
from sherd.tools.simulate.settings import Mesh
from sherd.tools.simulate.timeline import Lane
from sherd.tools.simulate.work import Collective, Op, OpKind, RankGroup, checkpointed
from tests.planning.stacks import BACKWARD, FORWARD, WEIGHT, sharded_stack, stack

H100 = read_cluster("h100")
EIGHT = Mesh(8)


def predicted(work, sharded, cluster=H100, mesh=EIGHT, **options):
    rank = RankWork(work, sharded, parts_of(work, sharded, ClusterCosts(cluster).op))
    return predict(rank, cluster, mesh, **options)


def heavy(num_blocks, gflops):
    """The stack with operations that take a while."""
    work = stack(num_blocks)
    ops = {
        FORWARD: Op(OpKind.MATMUL, "forward", gflops * 10**9, 1, "bfloat16"),
        BACKWARD: Op(OpKind.MATMUL, "backward", 2 * gflops * 10**9, 1, "bfloat16"),
    }
    events = tuple(ops.get(event, event) if isinstance(event, Op) else event for event in work.events)
    return replace(work, events=events, samples=2, tokens=4096)


def test_mfu_is_of_what_the_model_computes():
    work = heavy(4, 7000)
    for each in (work, checkpointed(work, [1, 2, 3, 4])):
        found = predicted(each, sharded_stack(4), micro_batches=2)
        assert found.flops == 2 * work.flops
        assert found.mfu == pytest.approx(found.flops / found.timeline.seconds / 989.4e12)
        assert found.tokens_per_second == pytest.approx(8 * 2 * 4096 / found.timeline.seconds)
        assert found.samples_per_second == pytest.approx(8 * 2 * 2 / found.timeline.seconds)
    # Operations reach 600 of 989.4 TFLOP/s, and there is nearly nothing else.
    assert predicted(work, sharded_stack(4)).mfu == pytest.approx(600 / 989.4, rel=0.01)


def test_mfu_of_a_dtype_without_a_figure_is_of_another_ones_peak():
    figures = {name: H100.device.peak_flops[name] for name in ("bfloat16", "float32")}
    cluster, work = replace(H100, device=replace(H100.device, peak_flops=figures)), heavy(4, 7000)
    for dtype, peak in (("float64", 66.9e12), ("float16", 989.4e12)):
        events = (replace(each, dtype=dtype) if isinstance(each, Op) else each for each in work.events)
        found = predicted(replace(work, events=tuple(events)), sharded_stack(4), cluster)
        assert found.mfu == pytest.approx(found.flops / found.timeline.seconds / peak), dtype


def test_the_price_is_that_of_all_devices():
    found = predicted(heavy(4, 7000), sharded_stack(4))
    assert found.cost_per_million_tokens == pytest.approx(3.0 * 8 / 3600 / found.tokens_per_second * 1e6)
    assert found.cost_per_million_samples == pytest.approx(3.0 * 8 / 3600 / found.samples_per_second * 1e6)
    twice = found.lasting(2 * found.timeline.seconds)
    assert twice.cost_per_million_samples == pytest.approx(2 * found.cost_per_million_samples)
    free = predicted(heavy(4, 7000), sharded_stack(4), replace(H100, price_per_hour=None))
    assert free.cost_per_million_samples is free.cost_per_million_tokens is None


def test_links_carry_what_collectives_send():
    # Forward gathers four times, backward three times: the last block is still there.
    gathers, reduces = 4 + 4, 4
    # Of a ring through 8 devices of a node, one sends to the next node.
    for mesh, shares in ((Mesh(8), {"within nodes": 1}), (Mesh(16), {"within nodes": 7 / 8, "across nodes": 1 / 8})):
        found = predicted(heavy(4, 10), sharded_stack(4, ranks=mesh.shard), H100, mesh)
        spans = [span for span in found.timeline.spans if span.lane in (Lane.GATHER, Lane.REDUCE)]
        assert len(spans) == gathers + reduces
        nbytes = len(spans) * (WEIGHT * (mesh.shard - 1) // mesh.shard)
        assert found.sent == {link: round(share * nbytes) for link, share in shares.items()}


def test_what_crosses_nodes_takes_the_links_no_longer_than_the_collective_lasts():
    group = {kind: RankGroup(16) for kind in ("all-gather", "reduce-scatter", "all-to-all", "broadcast")}
    for kind, ranks in group.items():
        across = ClusterCosts(H100).links(kind, ranks)["across nodes"] * 15 / 16 * 1e12
        assert across / H100.across.bandwidth <= collective_seconds(kind, 10**12, NodeRanks(16, 8), H100), kind
    assert ClusterCosts(H100).links("all-to-all", RankGroup(16))["across nodes"] == pytest.approx(8 / 15)
    assert ClusterCosts(H100).links("send", RankGroup(2, 8)) == {"across nodes": 1}


def test_replicas_are_on_other_nodes_once_shards_fill_one():
    units = tuple(
        replace(unit, traffic=tuple(replace(each, all_reduced=100, replicate=RankGroup(2, 8)) for each in unit.traffic))
        for unit in sharded_stack(2).units
    )
    sharded = replace(sharded_stack(2), units=units)
    found = predicted(heavy(2, 10), sharded, H100, Mesh(8, 2))
    assert found.sent["across nodes"] == 2 * 2 * 100 // 2
    (span, _) = (span for span in found.timeline.spans if span.lane is Lane.ALL_REDUCE)
    assert span.end - span.start == pytest.approx(collective_seconds("all-reduce", 100, NodeRanks(2, 1), H100))


def test_without_streams_each_collective_of_the_model_is_sent_by_its_own_link():
    near, far = (
        Collective("all-gather", nbytes, group) for nbytes, group in ((100, RankGroup(2)), (7000, RankGroup(2, 2)))
    )
    work = stack(2)
    events = (each for event in work.events for each in ((event, near, near, far) if event == FORWARD else (event,)))
    found = predicted(replace(work, events=tuple(events)), sharded_stack(2, ranks=1), read_cluster("laptop"), Mesh(1))
    assert found.sent == {"within nodes": 2 * 2 * 50, "across nodes": 2 * 3500}


def test_groups_of_a_unit_send_as_much_together_as_one_by_one():
    root, *blocks = sharded_stack(2).units
    twice = (replace(each, groups=each.groups * 2, traffic=each.traffic * 2) for each in blocks)
    sharded = replace(sharded_stack(2, ranks=2), units=(root, *twice))
    for cluster in map(read_cluster, ("laptop", "h100")):
        once, found = (predicted(stack(2), each, cluster).sent for each in (sharded_stack(2), sharded))
        assert found == {link: 2 * nbytes for link, nbytes in once.items()}, cluster.name


def test_what_is_reserved_is_more_than_what_is_alive_and_a_rank_alone_sends_nothing():
    found = predicted(heavy(4, 10), sharded_stack(4))
    assert found.timeline.peak.nbytes <= found.reserved_bytes
    assert found.driver_bytes == found.reserved_bytes + H100.device.library_bytes
    found = predicted(heavy(2, 10), sharded_stack(2, ranks=1), mesh=Mesh(1))
    assert found.sent == found.timeline.exposed == {}
