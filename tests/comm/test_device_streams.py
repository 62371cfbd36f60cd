"""On an accelerator each lane waits, on the device, for exactly what it should. Played with fake streams."""

from __future__ import annotations

import pytest
import torch

from sherd.comm import streams as lanes
from sherd.comm.streams import DeviceStreams, HostStreams, Queued, streams_for, use_streams

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """Writes down what it is told, in one log for all; `with` makes it the current one, as torch's does."""

    log: list[tuple[str, ...]]
    stack: list[FakeStream]
    made: int

    def __init__(self, device: torch.device, priority: int = 0, name: str = "") -> None:
        self.name = name or ("gather", "reduce", "all_reduce")[FakeStream.made]
        FakeStream.made += not name
        self.priority = priority

    def __enter__(self) -> FakeStream:
        FakeStream.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        FakeStream.stack.pop()

    def wait_stream(self, other: FakeStream) -> None:
        FakeStream.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        FakeStream.log.append((self.name, "waits for", event))

    def record_event(self) -> str:
        FakeStream.log.append((self.name, "records"))
        return f"event of {self.name}"


@pytest.fixture
def device(monkeypatch) -> DeviceStreams:
    FakeStream.log, FakeStream.made = [], 0
    FakeStream.stack = [FakeStream(DEVICE, name="compute")]
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: FakeStream.stack[-1])
    return DeviceStreams(DEVICE)


def collective(async_op: bool) -> None:
    assert not async_op, "the stream orders it, so it need not return a Work"
    FakeStream.log.append((FakeStream.stack[-1].name, "collective"))


def test_a_collective_that_is_noted_has_an_event_before_it_too_and_one_that_is_not_has_none(device):
    queued = Queued()
    with device.noting(queued):
        device.reduce.run(collective, after=device.gather.run(collective))
    assert FakeStream.log == [
        *(("gather", "records"), ("gather", "collective"), ("gather", "records")),
        ("reduce", "waits for", "event of gather"),
        *(("reduce", "records"), ("reduce", "collective"), ("reduce", "records")),
    ]
    assert queued
    FakeStream.log.clear()
    device.gather.run(collective)
    assert FakeStream.log == [("gather", "collective"), ("gather", "records")]


def test_nothing_is_noted_while_a_graph_is_captured_and_no_event_of_before_is_asked(device, monkeypatch):
    queued = Queued()
    with device.noting(queued):
        device.gather.run(collective)
    FakeStream.log.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with device.noting(queued):
        device.gather.run(collective)
    assert FakeStream.log == [("gather", "collective"), ("gather", "records")]
    assert queued.waits_s() == 0  # an event here is text, and has no query()


def test_a_collective_runs_on_its_lane_and_what_waits_for_it_waits_for_its_event_and_only_when_told(device):
    """As often as told: compute, and another lane, which does not wait for all of this one."""
    handoff = device.reduce.run(collective)
    assert FakeStream.log == [("reduce", "collective"), ("reduce", "records")]
    handoff.wait()
    handoff.wait()
    device.all_reduce.run(collective, after=handoff)
    assert FakeStream.log[2:] == [
        *[("compute", "waits for", "event of reduce")] * 2,
        ("all_reduce", "waits for", "event of reduce"),
        ("all_reduce", "collective"),
        ("all_reduce", "records"),
    ]


def test_a_lane_follows_compute_a_step_begins_behind_the_optimizers_event_or_compute_and_own_work_is_between(device):
    own = FakeStream(DEVICE, name="own")
    device.gather.follow_compute()
    device.begin_step("the optimizer's event")
    device.begin_step()
    device.run_beside(own, lambda: collective(False))
    assert FakeStream.log == [
        ("gather", "waits for", "compute"),
        ("gather", "waits for", "the optimizer's event"),
        ("gather", "waits for", "compute"),
        ("own", "waits for", "compute"),
        ("own", "collective"),
        ("compute", "waits for", "own"),
    ]


def test_gathers_and_reduce_scatters_go_before_queued_compute(device):
    assert device.gather._stream.priority < 0
    assert device.reduce._stream.priority < 0
    assert not device.in_host_order


def test_an_accelerator_has_one_set_of_lanes_for_all_models_and_the_cpu_has_lanes_without_streams(device, monkeypatch):
    monkeypatch.setattr(lanes, "_by_device", {})
    FakeStream.made = 0
    assert isinstance(streams_for(DEVICE), DeviceStreams)
    assert streams_for(DEVICE) is streams_for(torch.device("cuda", 0))
    assert isinstance(streams_for(torch.device("cpu")), HostStreams)
    assert isinstance(streams_for(torch.device("meta")), HostStreams)
    mine, cpu = HostStreams(), torch.device("cpu")
    with use_streams(mine):  # for a while
        assert streams_for(cpu) is mine
    assert streams_for(cpu) is not mine


class FakeWork:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_without_streams_a_collective_starts_at_once_behind_others_and_is_waited_for_once():
    work, streams = FakeWork(), HostStreams()
    asked: list[bool] = []

    def start(async_op: bool) -> FakeWork:
        asked.append(async_op)
        return work

    handoff = streams.reduce.run(start)
    assert (asked, work.waits) == ([True], 0)
    streams.all_reduce.run(lambda async_op: FakeWork() if work.waits == 1 else pytest.fail("too early"), handoff)
    handoff.wait()
    handoff.wait()
    assert work.waits == 1
