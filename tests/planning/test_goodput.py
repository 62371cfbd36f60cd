"""The predicted goodput is what a simulation with random failures, jitter and stragglers has."""

import math
import random
from statistics import mean

import pytest

from sherd.tools.simulate.goodput import (
    Faults,
    best_interval,
    goodput,
    jitter_slowdown,
    straggler_slowdown,
    useful_share,
)


def test_jitter_and_one_slow_device_slow_all_ranks_down_to_the_slowest():
    for num_ranks, jitter in ((1, 0.2), (2, 0.05), (8, 0.3), (64, 0.1), (1000, 0.02)):
        draw = random.Random(0).gauss
        steps = 40_000 // num_ranks + 400
        slowest = [max(math.exp(draw(-(jitter**2) / 2, jitter)) for _ in range(num_ranks)) for _ in range(steps)]
        assert jitter_slowdown(num_ranks, jitter) == pytest.approx(mean(slowest), rel=0.01), num_ranks
    draw = random.Random(0).random
    clusters = [1.2 if any(draw() < 0.01 for _ in range(50)) else 1.0 for _ in range(4000)]
    assert straggler_slowdown(50, 0.01, 0.2) == pytest.approx(mean(clusters), rel=0.01)
    assert straggler_slowdown(131_072, 0.01, 0.2) == pytest.approx(1.2)


def simulated_share(interval, mtbf, checkpoint, restart, intervals):
    """The share of useful time of a training whose failures are drawn: at each the interval begins anew."""
    draw, clock = random.Random(1), 0.0
    for _ in range(intervals):
        needed = interval + checkpoint
        while (fails := draw.expovariate(1 / mtbf)) < needed:
            clock += fails
            needed = restart + interval + checkpoint
        clock += needed
    return intervals * interval / clock


def test_failures_leave_what_a_simulation_has_and_no_other_interval_leaves_more():
    for given in ((100.0, 5000.0, 5.0, 60.0), (600.0, 1000.0, 30.0, 120.0), (10.0, 100_000.0, 1.0, 10.0)):
        assert useful_share(*given) == pytest.approx(simulated_share(*given, 20_000), rel=0.02), given
    for mtbf, checkpoint in ((10_000.0, 10.0), (3_000.0, 60.0), (500.0, 100.0)):
        best = best_interval(mtbf, checkpoint)
        left = useful_share(best, mtbf, checkpoint, 300.0)
        others = [useful_share(best * by, mtbf, checkpoint, 300.0) for by in (0.5, 0.8, 1.25, 2)]
        assert max(others) <= left * 1.001, mtbf
        if checkpoint < mtbf / 100:
            assert best == pytest.approx(math.sqrt(2 * checkpoint * mtbf), rel=0.1)


def test_more_devices_leave_less():
    for num_devices in (1, 8, 1024, 16_384, 131_072):
        few, many = (goodput(number, Faults(slow_share=1e-4)) for number in (num_devices, 2 * num_devices))
        for part in ("jitter", "stragglers", "failures", "share"):
            assert 0 < getattr(many, part) <= getattr(few, part) <= 1, (num_devices, part)
        assert many.interval < few.interval, num_devices


def test_without_faults_everything_is_left_and_of_a_cluster_that_fails_before_it_has_started_nothing():
    assert goodput(131_072, Faults(jitter=0.0, mtbf=1e15)).share == pytest.approx(1, rel=1e-3)
    assert goodput(8, Faults(jitter=0.0, checkpoint=0.0, restart=0.0)).share == 1
    assert goodput(131_072, Faults(mtbf=1.0, restart=3600.0)).share == 0
