"""The watchdog blames what is to blame, and nothing else. Without a device: with sources and events of its own."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sherd.comm import streams
from sherd.comm.streams import Queued
from sherd.errors import CommError
from sherd.guard import watchdog as module
from sherd.guard.flight import FOLDER, Recorder
from sherd.guard.watchdog import DOUBT_AFTER_S, TEAR_DOWN, Port, Watchdog
from tests.comm.test_flight import Standing, nobody_answers  # noqa: F401  a fixture


class Waiting(Standing):
    """A source whose device has been waiting for as long as it is told."""

    def __init__(self, device_waits_s: float, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__(device_waits_s)
        self.ranks, self.device_waits_s, self.lost = ranks, device_waits_s, ""

    def lose(self, text: str) -> None:
        self.lost = text


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order, instead of raising and aborting."""
    done: list[str] = []
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(module, "abort_groups", lambda: done.append("abort"))
    monkeypatch.setattr(module, "_raise_in_main_thread", lambda text, has_raised: (has_raised.set(), done.append(text)))
    return done


def look_again(watchdog: Watchdog, has_store: bool = True) -> None:
    watchdog._next_look = 0.0
    watchdog.look(has_store)


def watchdogs(source: Standing, timeout_s: float = 60, num_ranks: int = 2) -> tuple[Watchdog, Recorder, Watchdog]:
    """That of rank 0 with its recorder, which knows `source`, and that of rank 1."""
    store: Any = dist.HashStore()
    one, other = (Recorder(store, rank, num_ranks, timedelta(seconds=timeout_s)) for rank in range(2))
    one.join(source)
    return Watchdog(one, store, 0), one, Watchdog(other, store, 1)


@pytest.mark.usefixtures("nobody_answers")
def test_a_rank_whose_port_is_closed_and_that_is_silent_has_died(aborts, capfd):
    source = Waiting(DOUBT_AFTER_S + 0.1)
    watchdog, _, other = watchdogs(source)
    watchdog.look(has_store=True)
    assert aborts == []
    other.close()
    look_again(watchdog)
    text, abort = aborts
    assert "rank 1 has died, or left the group" in text
    assert abort == "abort"
    assert source.lost == text
    assert f"sherd: CommError: {text}" in capfd.readouterr().err
    look_again(watchdog)
    assert len(aborts) == 2


@pytest.mark.usefixtures("nobody_answers")
@pytest.mark.parametrize(
    ("waits", "within", "after"), [("device_waits_s", 59, 60.5), ("waits_s", 61, 60 + module.GRACE_S + 0.1)]
)
def test_a_rank_that_is_silent_and_has_its_port_is_named_after_the_timeout_alone(aborts, waits, within, after):
    """Its interpreter is blocked. A host that waits gets the time to raise by itself."""
    source = Waiting(0.0)
    setattr(source, waits, within)
    watchdog, _, _other = watchdogs(source)
    watchdog.look(has_store=True)
    assert aborts == []
    setattr(source, waits, after)
    look_again(watchdog)
    text, _abort = aborts
    assert "the timeout of the default group is 60 s" in text
    assert "Rank 1 has not answered" in text


def test_a_rank_that_answers_has_not_died_whatever_becomes_of_its_port(aborts):
    """A firewall refuses, or another host answers to that name."""
    source = Waiting(5)
    watchdog, recorder, other = watchdogs(source)
    other.close()
    answering = other._recorder
    ended = threading.Event()

    def answer() -> None:
        while not ended.wait(0.01):
            answering.look()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        watchdog.look(has_store=True)
    finally:
        ended.set()
        thread.join()
    assert aborts == []
    asked = recorder._answered
    look_again(watchdog)
    assert (aborts, recorder._answered) == ([], asked)


def test_without_the_store_a_closed_port_is_enough_if_its_number_was_read(aborts):
    source = Waiting(5)
    watchdog, _, other = watchdogs(source)
    watchdog.look(has_store=True)
    other.close()
    look_again(watchdog, has_store=False)
    assert "rank 1 has died" in aborts[0]


@pytest.mark.usefixtures("nobody_answers")
def test_nothing_ends_if_the_user_does_not_want_it(aborts, monkeypatch, capfd):
    monkeypatch.setenv(TEAR_DOWN, "0")
    source = Waiting(61)
    watchdog, _, _other = watchdogs(source)
    watchdog.look(has_store=True)
    assert (aborts, source.lost) == ([], "")
    assert "CommError" in capfd.readouterr().err


@pytest.mark.usefixtures("nobody_answers")
def test_without_an_accelerator_a_host_that_waits_finds_who_has_died_and_its_call_has_the_time_out(monkeypatch, aborts):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    source = Waiting(1e9)
    source.device_waits_s = None
    watchdog, _, other = watchdogs(source)
    look_again(watchdog)
    assert aborts == []
    other._port.close()
    look_again(watchdog)
    assert "rank 1 has died" in source.lost
    assert aborts == [source.lost, "abort"]


def test_of_many_ranks_each_is_looked_after_by_those_before_it():
    ranks = list(range(0, 300, 3))
    found = [module._next_of(rank, ranks) for rank in ranks]
    assert {len(each) for each in found} == {64}
    assert found[98][:3] == [297, 0, 3]
    assert module._next_of(3, (0, 3, 6)) == [6, 0]


def test_the_main_thread_raises_where_it_is_and_goes_no_further():
    """The error is there before the groups are aborted, so no result of an aborted collective is seen."""
    raised, aborted = threading.Event(), threading.Event()

    def end() -> None:
        waits.get()
        module._raise_in_main_thread("rank 1 has died", raised)
        aborted.set()

    def wait() -> None:
        waits.put(None)
        aborted.wait(10)
        raise AssertionError("it went on")

    waits: queue.SimpleQueue[None] = queue.SimpleQueue()
    thread = threading.Thread(target=end)
    thread.start()  # before, for an error within leaves Python's own books of threads wrong
    with pytest.raises(CommError, match="rank 1 has died") as caught:
        wait()
    thread.join()
    assert raised.is_set()
    assert type(caught.value).__name__ == "CommError"
    assert type(pickle.loads(pickle.dumps(caught.value))) is CommError


# Ports


def port_of(store: Any, rank: int) -> Port:
    port = Port(store, rank)
    port.find(range(2))
    return port


def test_a_port_is_refused_once_it_is_closed():
    store: Any = dist.HashStore()
    one, other = port_of(store, 0), port_of(store, 1)
    one.find([1])
    assert one.refused([1]) == []
    other.accept()
    other.close()
    assert one.refused([1]) == [1]
    one.doubt(1)
    assert one.refused([1]) == []


def test_a_rank_that_cannot_be_reached_is_not_accused_and_not_asked_again(monkeypatch):
    store: Any = dist.HashStore()
    store.set("port/1", '["elsewhere.invalid", 1]')
    port, calls = port_of(store, 0), []

    def unreachable(*address: object) -> None:
        calls.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert port.refused([1]) == []
    assert port.refused([1]) == []
    assert len(calls) == 1


def test_a_child_that_loads_data_does_not_hold_the_port():
    store: Any = dist.HashStore()
    one, other = port_of(store, 0), port_of(store, 1)
    one.find([1])
    heard, tells = os.pipe()
    if not (child := os.fork()):
        os.close(tells)
        os.read(heard, 1)  # until the other end is closed
        os._exit(0)
    try:
        other.close()
        deadline = time.monotonic() + 10
        while not one.refused([1]) and time.monotonic() < deadline:  # the child has just begun
            time.sleep(0.01)
        assert one.refused([1]) == [1]
    finally:
        os.close(heard)
        os.close(tells)
        os.waitpid(child, 0)


# What a device has queued


class Event:
    is_past = False

    def query(self) -> bool:
        return self.is_past


def queued_between(queued: Queued, lane: object) -> tuple[Any, Any]:
    begun, done = Event(), Event()
    queued.add(lane, begun, done)  # type: ignore[arg-type]
    return begun, done


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clock.now` in seconds, for what is queued."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(streams, "time", clock)
    return clock


def test_compute_before_a_collective_is_not_counted(clock):
    queued, lane = Queued(), object()
    assert not queued
    begun, done = queued_between(queued, lane)
    assert queued
    assert queued.waits_s() == 0
    clock.now += 5
    begun.is_past = True
    assert 0 < queued.waits_s() < 0.1
    clock.now += 1
    assert queued.waits_s() == 1
    done.is_past = True
    assert queued.waits_s() == 0


def test_the_lane_that_has_waited_longest_counts_and_each_collective_for_itself(clock):
    queued, lanes = Queued(), (object(), object())
    first, second = queued_between(queued, lanes[0]), queued_between(queued, lanes[0])
    beside = queued_between(queued, lanes[1])
    first[0].is_past = beside[0].is_past = True
    queued.waits_s()
    clock.now += 3
    assert queued.waits_s() == 3
    first[1].is_past = second[0].is_past = True
    assert queued.waits_s() == 3
    beside[1].is_past = True
    assert queued.waits_s() < 0.1


def test_a_device_that_has_failed_waits_for_nobody():
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access")

    queued = Queued()
    queued.add(object(), Broken(), Broken())  # type: ignore[arg-type]
    assert queued.waits_s() == 0
