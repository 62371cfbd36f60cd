"""Is each lane behind what it reads and before what reads it, when compute or lanes are late and free memory is spoilt?

Every case also runs in host order, on one stream; both must give the same finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from sherd.comm import streams
from sherd.comm.streams import DeviceStreams
from tests.gpu.devices import Accelerator, here
from tests.gpu.load import CASES, Case, differs, in_host_order, tolerance, under_load

LATE = {"late readers": ("reader",), "late lanes": ("lane",), "nobody late": ()}
"""Who is late, by name: fields of `Case`."""


def late(case: Case, who: str, accelerator: Accelerator) -> Case:
    return replace(case, **dict.fromkeys(LATE[who], accelerator.late_us))


def ranks_of(case: Case, fake_ranks):
    return fake_ranks(2, 2) if case.replicas > 1 else fake_ranks(4)


@pytest.mark.parametrize("name", CASES)
def test_whoever_is_late_numbers_are_those_of_host_order(name, accelerator, fake_ranks):
    case = CASES[name]
    with ranks_of(case, fake_ranks) as mesh:
        expected = in_host_order(case, mesh, accelerator)
        assert not accelerator.races()
        for who in LATE:
            found, seen = under_load(late(case, who, accelerator), mesh, accelerator)
            assert differs(found, expected, **tolerance(case)) is None, who
            assert not accelerator.races(), who
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
    queues = DeviceStreams(here().device)
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
def test_an_order_that_is_missing_shows(order, placement, accelerator, fake_ranks):
    """In the numbers, or to a device that counts accesses which nothing orders: that one needs no luck."""
    without, lane, who = MISSING[order]
    case = CASES[f"{placement}, one ahead, freed"]
    with fake_ranks(4) as mesh:
        expected = in_host_order(case, mesh, accelerator)
        with without(lane) as queues:
            found, _ = under_load(late(case, who, accelerator), mesh, accelerator, queues)
        races = accelerator.races()
        assert races or differs(found, expected, **tolerance(case)) is not None
        assert bool(races) is accelerator.names_races
