"""Each lane is behind what it reads and before what reads it, when compute or lanes are late and free memory is spoilt.

Every case also runs in host order, on one stream; both must give the same finite numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from sherd.comm import streams
from sherd.comm.streams import DeviceStreams
from tests.gpu.devices import Accelerator
from tests.gpu.load import CASES, Case, differs, in_host_order, tolerance, under_load

LATE = {"late readers": ("reader",), "late lanes": ("lane",), "nobody late": ()}
"""Who is late, by name: fields of `Case`."""


def late(case: Case, who: str, accelerator: Accelerator) -> Case:
    return replace(case, **dict.fromkeys(LATE[who], accelerator.late_us))


@pytest.mark.parametrize("name", CASES)
def test_whoever_is_late_numbers_are_those_of_host_order(name, accelerator, fake_ranks):
    case = CASES[name]
    with fake_ranks(*case.setting.mesh) as mesh:
        expected = in_host_order(case, mesh, accelerator)
        assert not accelerator.races()
        for who in LATE:
            found, seen = under_load(late(case, who, accelerator), mesh, accelerator)
            assert differs(found, expected, **tolerance(case)) is None, who
            assert not accelerator.races(), who
            assert seen["lanes"] > 0
            assert seen["bytes"] > 0


# Is it the load that would show it? One order at a time is taken away.


def does_not(owner: Any, method: str) -> AbstractContextManager[Any]:
    """Inside, `owner.method` does nothing."""
    return mock.patch.object(owner, method, return_value=None)


MISSING = {
    "gathers behind readers": (lambda queues: does_not(queues.gather, "follow_compute"), "late readers"),
    "reductions behind gradients": (lambda queues: does_not(queues.reduce, "follow_compute"), "late readers"),
    "gathers behind the optimizer": (lambda queues: does_not(queues, "begin_step"), "late readers"),
    "compute behind lanes": (lambda queues: does_not(streams._Recorded, "wait"), "late lanes"),
}


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
@pytest.mark.parametrize("order", MISSING)
def test_an_order_that_is_missing_shows(order, placement, accelerator, fake_ranks):
    """In the numbers, or to a device that counts accesses which nothing orders: that one needs no luck."""
    without, who = MISSING[order]
    queues = DeviceStreams(accelerator.device)
    case = CASES[f"{placement}, one ahead, freed"]
    with fake_ranks(4) as mesh:
        expected = in_host_order(case, mesh, accelerator)
        with without(queues):
            found, _ = under_load(late(case, who, accelerator), mesh, accelerator, queues)
        races = accelerator.races()
        assert races or differs(found, expected, **tolerance(case)) is not None
        assert bool(races) is accelerator.names_races
