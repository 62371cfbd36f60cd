"""Costs are those of the formulas, worked out by hand, and they grow with bytes and ranks."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sherd.tools.simulate.cluster import Link, Timed, read_cluster, shipped_clusters
from sherd.tools.simulate.costs import ClusterCosts, NodeRanks, collective_seconds, op_seconds, waited
from sherd.tools.simulate.work import Op, OpKind, RankGroup

H100 = read_cluster("h100")
# Round figures: 1 us and 100 GB/s within a node, 10 us and 10 GB/s per device across.
ROUND = replace(H100, device=replace(H100.device, launch=0.0), within=Link(1e-6, 1e11), across=Link(1e-5, 1e10))
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "send")


def op(kind, flops, nbytes, dtype="bfloat16", name="aten.any"):
    return Op(kind, name, flops, nbytes, dtype)


# Operations


def test_ranks_wait_for_the_slowest_by_the_root_of_what_they_have_computed():
    uneven = ClusterCosts(replace(H100, device=replace(H100.device, skew=2e-4)))
    assert uneven.waited(1e-3) == pytest.approx(2e-4)
    assert uneven.waited(16e-3) == pytest.approx(8e-4)
    assert (uneven.waited(0.0), ClusterCosts(H100).waited(1.0), waited(4e-3, 1.0)) == (0, 0, pytest.approx(2))


def test_an_operation_takes_the_longer_of_computing_and_moving_after_its_launch():
    device = H100.device
    flops, bandwidth = round(device.flops["bfloat16"]), round(device.bandwidth)
    attention = op(OpKind.ATTENTION, flops, 10)
    assert op_seconds(op(OpKind.MATMUL, flops, 10), device) == pytest.approx(1 + 4e-6)
    assert op_seconds(op(OpKind.MATMUL, 10, bandwidth), device) == pytest.approx(1 + 4e-6)
    assert op_seconds(attention, device) == pytest.approx(1 / device.attention_share + 4e-6)
    assert op_seconds(replace(attention, computed=0.5), device) == pytest.approx(0.5 / device.attention_share + 4e-6)
    assert op_seconds(op(OpKind.POINTWISE, 0, bandwidth), device) == pytest.approx(1 + 4e-6)
    assert op_seconds(op(OpKind.LOOKUP, 0, bandwidth), device) == pytest.approx(1 / 0.6 + 4e-6)
    assert op_seconds(op(OpKind.COPY, 0, 0), device) == 4e-6


def test_small_matrix_products_are_slower_and_at_half_the_speed_where_computing_takes_one_launch():
    device, flops = H100.device, H100.device.flops["bfloat16"]
    half = round(flops * device.launch)
    assert half / op_seconds(op(OpKind.MATMUL, half, 0), device) == pytest.approx(flops / 2)


def test_a_dtype_without_a_figure_computes_as_its_neighbour():
    device = replace(H100.device, flops={"bfloat16": 2e12, "float32": 1e12})
    neighbours = {"float16": "bfloat16", "float32": "float32", "float64": "float32", "int8": "float32"}
    for dtype, as_dtype in neighbours.items():
        took = op_seconds(op(OpKind.MATMUL, 10**12, 0, dtype), device)
        assert took == pytest.approx(1e12 / device.flops[as_dtype] + 4e-6), dtype


def timed(*each, name="mm", launch=0.0):
    """The device of the H100 with operations in bfloat16 that were timed."""
    return replace(H100.device, launch=launch, timed={f"{name}.bfloat16": each})


def test_an_operation_takes_what_it_was_timed_with_and_a_product_what_one_with_as_many_flop_per_byte_does():
    points = Timed(10**9, 10**6, 64, 0.5), Timed(10**9, 10**6, 512, 0.1), Timed(10**10, 10**7, 64, 6.0)
    device = timed(*points)
    for each in points:
        product = Op(OpKind.MATMUL, "aten.mm", each.flops, each.nbytes, "bfloat16", each.depth)
        assert op_seconds(product, device) == pytest.approx(each.seconds, rel=0.01)
        assert op_seconds(replace(product, dtype="float32"), device) == op_seconds(
            replace(product, dtype="float32"), replace(H100.device, launch=0.0)
        ), "another dtype was not timed"
    many, few = Timed(10**9, 10**6, 64, 1.0), Timed(10**11, 10**9, 64, 1.0)
    product = Op(OpKind.MATMUL, "aten.mm", 10**11, 10**8, "bfloat16", 64)
    assert op_seconds(product, timed(many, few)) == pytest.approx(100, rel=0.2)


@given(st.integers(10**3, 10**12))
def test_between_operations_that_were_timed_it_is_as_much_slower_as_they_are(nbytes):
    rates = (1e9, 2e9, 4e9)
    points = (Timed(0, 10**size, 0, 10**size / rate) for size, rate in zip((5, 7, 9), rates, strict=True))
    device = timed(*points, name="add")
    took = op_seconds(op(OpKind.POINTWISE, 0, nbytes, name="aten.add"), device)
    assert min(rates) * (1 - 1e-6) <= nbytes / took <= max(rates) * (1 + 1e-6)


# Collectives


TAKEN = (
    # 8 ranks of a node: 7 steps, 7/8 GB at 100 GB/s.
    ("all-gather", NodeRanks(8, 8), 7e-6 + 0.875e-2),
    ("reduce-scatter", NodeRanks(8, 8), 7e-6 + 0.875e-2),
    ("all-reduce", NodeRanks(8, 8), 2 * (7e-6 + 0.875e-2)),
    ("broadcast", NodeRanks(8, 8), 7e-6 + 1e-2),
    ("all-to-all", NodeRanks(8, 8), 7e-6 + 0.875e-2),
    ("send", NodeRanks(2, 2), 1e-6 + 1e-2),
    # 2 nodes of 4 ranks: 6 steps within, 1 across, and 4 x 10 GB/s between the nodes.
    ("all-gather", NodeRanks(8, 4), 6e-6 + 1e-5 + 0.875 / 40),
    ("all-reduce", NodeRanks(8, 4), 2 * (6e-6 + 1e-5 + 0.875 / 40)),
    ("broadcast", NodeRanks(8, 4), 6e-6 + 1e-5 + 1 / 40),
    ("all-to-all", NodeRanks(8, 4), 3e-6 + 4e-5 + 0.125 * (3 / 100 + 4 / 10)),
    # A rank per node: log2 of the steps, 10 GB/s.
    ("all-gather", NodeRanks(8, 1), 3e-5 + 0.875 / 10),
    ("send", NodeRanks(2, 1), 1e-5 + 1 / 10),
    ("all-gather", NodeRanks(1, 1), 0.0),
)


def test_a_collective_takes_what_was_worked_out_by_hand_and_what_others_have_measured():
    for kind, ranks, seconds in TAKEN:
        assert collective_seconds(kind, 10**9, ranks, ROUND) == pytest.approx(seconds), (kind, ranks)
    # A small all-reduce over many nodes goes by a tree.
    assert collective_seconds("all-reduce", 0, NodeRanks(1024, 8), ROUND) == pytest.approx(2 * (7e-6 + 7 * 1e-5))
    # Bekman, Machine Learning Engineering, all-reduce over 8 H200: what came of each size, in GB/s.
    rates = {2**15: 0.82, 2**18: 6.71, 2**20: 22.82, 2**22: 61.23, 2**24: 125.65, 2**26: 198.01}
    for nbytes, rate in rates.items():
        took = collective_seconds("all-reduce", nbytes, NodeRanks(8, 8), read_cluster("h200"))
        assert took == pytest.approx(nbytes / (rate * 1e9), rel=0.25), nbytes


@given(
    st.sampled_from(shipped_clusters()),
    st.sampled_from(KINDS),
    st.integers(1, 2**17),
    st.integers(1, 2**17),
    st.integers(1, 8),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)
def test_more_bytes_or_more_ranks_never_take_less(name, kind, size, more, per_node, nbytes, longer):
    assume(kind != "send" or size == 2)
    cluster, few = read_cluster(name), NodeRanks(size, min(size, per_node))
    took = collective_seconds(kind, nbytes, few, cluster)
    assert 0 <= took <= collective_seconds(kind, nbytes + longer, few, cluster)
    if kind != "send" and size >= per_node:
        assert took <= collective_seconds(kind, nbytes, NodeRanks(size + more, per_node), cluster) * (1 + 1e-9)


def test_a_group_of_ranks_apart_knows_how_many_share_a_node():
    for size, stride, per_node in ((16, 1, 8), (4, 1, 4), (2, 8, 1), (4, 2, 4), (8, 2, 4), (131072, 8, 1)):
        assert NodeRanks.of(RankGroup(size, stride), devices_per_node=8) == NodeRanks(size, per_node)


def test_an_optimizer_takes_its_time_for_each_shard_and_each_byte():
    costs = ClusterCosts(replace(H100, optimizer=Link(1e-4, 1e9)))
    assert costs.optimizer(10**9, 50, on_host=False) == pytest.approx(1 + 50e-4)
    assert costs.optimizer(10**9, 50, on_host=True) == ClusterCosts(H100).optimizer(10**9, 50, on_host=True)
    assert ClusterCosts(H100).optimizer(10**9, 50, on_host=False) == pytest.approx(
        4e-6 + 1e9 / (H100.device.bandwidth * 0.95)
    )
