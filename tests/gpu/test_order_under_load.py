"""Is each lane behind what it reads and before what reads it, when compute or lanes are late and free memory is spoilt?

Every case also runs in host order, on one stream; both must give the same finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from sherd.comm import streams
from sherd.comm.streams import DeviceStreams
from tests.gpu.load import CASES, CYCLES, Case, differs, in_host_order, tolerance, under_load

LATE = {
    "late readers": {"reader": CYCLES, "lane": 0},
    "late lanes": {"reader": 0, "lane": CYCLES},
    "nobody late": {"reader": 0, "lane": 0},
}


def ranks_of(case: Case, fake_ranks):
    return fake_ranks(2, 2) if case.replicas > 1 else fake_ranks(4)


@pytest.mark.parametrize("name", CASES)
def test_whoever_is_late_numbers_are_those_of_host_order(name, gpu, fake_ranks):
    case = CASES[name]
    with ranks_of(case, fake_ranks) as mesh:
        expected = in_host_order(case, mesh, gpu)
        for who, cycles in LATE.items():
            found, seen = under_load(replace(case, **cycles), mesh, gpu)
            assert differs(found, expected, **tolerance(case)) is None, who
            assert seen["lanes"] > 0
            assert seen["bytes"] > 0


# Is it the load that would show it? One order at a time is taken away.


@contextmanager
def lane_without_compute(lane: str) -> Iterator[DeviceStreams]:
    """This lane never waits for compute."""
    yield from _without(lambda queues: setattr(getattr(queues, lane), "follow_compute", lambda: None))


@contextmanager
def step_without_optimizer(_: str) -> Iterator[DeviceStreams]:
    """Gathers of a step do not wait for what has written the shards."""
    yield from _without(lambda queues: setattr(queues, "begin_step", lambda event=None: None))


@contextmanager
def compute_without_lanes(_: str) -> Iterator[DeviceStreams]:
    """Compute never waits for a lane."""
    with mock.patch.object(streams._Recorded, "wait"):
        yield from _without(lambda queues: None)


def _without(change: Callable[[DeviceStreams], None]) -> Iterator[DeviceStreams]:
    queues = DeviceStreams(torch.device("cuda", 0))
    change(queues)
    yield queues


MISSING = {
    "gathers behind readers": (lane_without_compute, "gather", "late readers"),
    "reductions behind gradients": (lane_without_compute, "reduce", "late readers"),
    "gathers behind the optimizer": (step_without_optimizer, "", "late readers"),
    "compute behind lanes": (compute_without_lanes, "", "late lanes"),
}


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
@pytest.mark.parametrize("order", MISSING)
def test_an_order_that_is_missing_shows(order, placement, gpu, fake_ranks):
    without, lane, who = MISSING[order]
    case = CASES[f"{placement}, one ahead, freed"]
    with fake_ranks(4) as mesh:
        expected = in_host_order(case, mesh, gpu)
        with without(lane) as queues:
            found, _ = under_load(replace(case, **LATE[who]), mesh, gpu, queues)
        assert differs(found, expected, **tolerance(case)) is not None
