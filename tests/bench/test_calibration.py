"""What plans of CPU ranks need is measured on trainings of small models."""

import time
from itertools import islice
from unittest import mock

import pytest
import torch.distributed as dist

from bench import calibration, operations
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.costs import op_seconds, waited
from sherd.tools.simulate.work import Op, OpKind

PROBES = operations.probes


def few(dtype):
    """Of the models that train while operations are timed, some small ones."""
    return islice(PROBES(dtype), 0, 60, 24)


def calibrated():
    shorter = mock.patch.multiple(calibration, STEPS_S=0.5, LEAST_TURNS=2)
    with mock.patch.object(operations, "probes", few), shorter:
        return calibration.calibrated(read_cluster("laptop"), ("gloo", "auto"))


@pytest.mark.slow
def test_a_cluster_gets_timed_operations_and_for_each_transport_what_collectives_and_steps_take(world):
    for clusters in world(2).run(calibrated):
        for cluster in clusters:
            device = cluster.device
            attention = "_scaled_dot_product_flash_attention_for_cpu"
            for name in ("mm", "addmm", "add", "gelu_backward", attention, f"{attention}_backward"):
                for dtype in ("float32", "bfloat16"):
                    assert all(each.seconds > 0 and each.nbytes > 0 for each in device.timed[f"{name}.{dtype}"])
            assert {each.depth for each in device.timed["mm.float32"]} >= {64}
            for each in device.timed["mm.float32"]:
                alike = Op(OpKind.MATMUL, "aten.mm", each.flops, each.nbytes, "float32", each.depth)
                assert op_seconds(alike, device) == pytest.approx(each.seconds, rel=0.01)
            assert cluster.optimizer.latency > 0
            assert cluster.within.latency > 0
            assert 0 < cluster.within.bandwidth <= device.bandwidth
            assert device.skew >= 0


def counted(least, seconds):
    """How often a rank goes on, of which the second is slower."""
    return [time.sleep(0.01 * dist.get_rank()) or number for number in operations.until(least, seconds)]


def test_all_ranks_go_on_equally_often(threads):
    for least, seconds in ((1, 0.0), (4, 0.0), (1, 0.1)):
        one, other = threads(2).run(counted, least, seconds)
        assert one == other == list(range(len(one)))
        assert len(one) == least if seconds == 0 else len(one) >= least


def test_what_equal_collectives_take_more_behind_more_compute_is_skew():
    soon, late = [(1e-4, 5e-4), (4e-4, 2e-3), (1e-3, 7e-3)], [1.6e-3, 6.4e-3, 16e-3]
    for skew, noise in ((3e-4, 0.0), (0.0, -1e-4)):
        later = [
            (more, took + noise + waited(more, skew) - waited(less, skew))
            for (less, took), more in zip(soon, late, strict=True)
        ]
        assert calibration._skew(soon, later) == pytest.approx(skew)


def in_turns():
    """The order of two calls, and the seconds of each. The second rank is slower; others disturb two runs of three."""
    ran = []

    def take(name, seconds):
        ran.append(name)
        disturbed = ran.count(name) % 3 > 0
        return seconds * (1 + dist.get_rank()) * (10 if disturbed else 1)

    with mock.patch.multiple(calibration, STEPS_S=0.0, seconds_of=lambda call, at: call()):
        return calibration._in_turns([lambda: take("a", 0.001), lambda: take("b", 0.01)]), ran


def test_calls_run_in_turns_and_the_lower_quartile_of_the_slowest_rank_counts(world):
    for seconds, ran in world(2).run(in_turns):
        assert ran == ["a", "b"] * (1 + calibration.LEAST_TURNS)
        assert seconds == [0.002, 0.02]
