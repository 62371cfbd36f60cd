"""The recorder writes when it is asked, and never stands in the way."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sherd.guard import flight
from sherd.guard.bounded_store import BoundedStore
from sherd.guard.flight import FOLDER, SIGNAL, Recorder
from tests.comm.test_shared_memory_deaths import ends
from tests.divergence.programs import sharded, step


class Standing:
    """A source that has done nothing, and waits for as long as it is told."""

    def __init__(self, waits_s: float = 0.0) -> None:
        self.key, self.ranks, self.waits_s, self.newest = "mesh", (0, 1), waits_s, 0
        self.device_waits_s: float | None = None
        self.thread = 0

    def record(self) -> dict[str, object]:
        return {"mesh": self.key, "ranks": self.ranks, "waits_s": self.waits_s, "wants": "", "collectives": []}

    def lose(self, text: str) -> None:
        raise AssertionError("it has no accelerator")

    def forget(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "new"))
    return tmp_path / "new"


def recorders(
    timeout_s: float = 60, kind: type[Standing] = Standing, num_ranks: int = 2
) -> tuple[list[Recorder], list[Standing], Any]:
    """Those of the ranks, a source that each knows, and their store."""
    store: Any = dist.HashStore()
    found = [Recorder(store, rank, num_ranks, timedelta(seconds=timeout_s)) for rank in range(num_ranks)]
    sources = [kind() for _ in found]
    for recorder, source in zip(found, sources, strict=True):
        recorder.join(source)
    return found, sources, store


def why(folder: Path, recorder: Recorder, rank: int = 0) -> str:
    """What the record of a rank says."""
    return json.loads((folder / f"sherd-flight-{recorder.job}-rank{rank}.json").read_text())["why"]


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody is waited for long."""
    monkeypatch.setattr(flight, "LOOK_EVERY_S", 0.01)


def test_all_ranks_of_a_job_have_one_name_for_it_and_the_last_words_are_said_once(folder):
    (one, other), (source, _), _ = recorders()
    assert one.job == other.job
    text = one.failed(source, "it failed", absent=False)
    assert text.startswith("it failed. What each rank has done is in")
    assert one.failed(source, text, absent=False) == text
    assert why(folder, one) == "it failed"


def test_a_rank_that_is_asked_writes_and_one_that_has_failed_keeps_what_it_wrote(folder):
    (one, other), sources, store = recorders()
    one.failed(sources[0], "it failed", absent=False)
    other.look()
    assert "has asked for it" in why(folder, one, 1)
    store.add("asked", 1)
    one.look()
    assert why(folder, one) == "it failed"


def test_a_rank_that_went_on_after_a_failure_writes_the_next_one(folder, nobody_answers):
    (one, other), sources, store = recorders()
    one.failed(sources[0], "first", absent=False)
    other.failed(sources[1], "first", absent=False)
    other._next_look = 1e9  # its thread is held up
    assert "Rank 1 has not answered" in one.failed(sources[0], "second", absent=True)
    assert why(folder, one) == "second"
    sources[0].newest = 5
    store.add("asked", 1)
    one.look()
    assert "has asked for it" in why(folder, one)


def test_a_wait_that_has_become_long_is_told_before_the_timeout(folder, capfd, nobody_answers):
    (one, _), (source, _), _ = recorders(timeout_s=10)
    source.waits_s = 4.9
    one.look()
    assert "waiting" not in capfd.readouterr().err
    source.waits_s, one._next_look = 5.1, 0.0
    one.look()
    said = capfd.readouterr().err
    assert "rank 0 has been waiting for other ranks for 5 s. Rank 1 has not answered" in said
    one._next_look = 0.0
    one.look()
    assert capfd.readouterr().err == ""


def test_of_many_ranks_that_wait_one_tells_and_names_others_in_one_sentence(folder, capfd, nobody_answers):
    found, sources, store = recorders(timeout_s=10, num_ranks=4)
    for source in sources[:2]:
        source.ranks, source.waits_s = (0, 1, 2, 3), 5.1
    found[1]._store = mock.Mock(wraps=store, add=lambda key, by: 0 if key == "asked" else store.add(key, by))
    found[0].look()
    assert "for 5 s. Each of ranks [1, 2, 3] has not answered for" in capfd.readouterr().err
    found[1].look()  # as if it had looked for questions before the other asked
    assert capfd.readouterr().err == ""


def test_records_lie_in_a_folder_of_their_own_unless_one_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHERD_FLIGHT_DIR")
    (one, _), (source, _), _ = recorders()
    one.failed(source, "it failed", absent=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sherd-flights"]
    assert (tmp_path / "sherd-flights" / f"sherd-flight-{one.job}-rank0.json").exists()


class GoneStore:
    """The store of a process that has died."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


def test_without_the_store_a_rank_writes_its_own_and_says_so(folder):
    (one, _), (source, _), _ = recorders()
    one._bounded = BoundedStore(GoneStore())
    text = one.failed(source, "it failed", absent=True)
    assert "the process group's store, or the link to it, is gone" in text
    assert "Rank 1" not in text
    assert (folder / f"sherd-flight-{one.job}-rank0.json").exists()


class Broken(Standing):
    """A source that cannot say what it did."""

    def record(self) -> dict[str, object]:
        raise ZeroDivisionError("a fault of ours")


def test_a_fault_of_the_recorder_hides_no_error(folder):
    (one, _), (source, _), _ = recorders(kind=Broken)
    assert one.failed(source, "it failed", absent=False).startswith("it failed. What this rank has done could not be")


# Signals


def test_a_signal_that_is_handled_is_left_alone_and_a_word_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv(SIGNAL, "SIGUSR2")
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        mine = signal.getsignal(signal.SIGUSR2)
        with pytest.warns(UserWarning, match="SIGUSR2"):
            recorders()
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, before)
    monkeypatch.setenv(SIGNAL, "SIGNONE")
    with pytest.warns(UserWarning, match="SIGNONE"):
        recorders()


def signals_a_blocked_rank(tell: Callable[[Any], None], folder: str) -> str:
    """Rank 0 sends the signal to rank 1, which waits for it in a collective, and goes on when both have written."""
    os.environ.update({FOLDER: folder, SIGNAL: "SIGUSR2"})
    model = sharded("gloo")
    for _ in range(3):
        step(model)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGUSR2)
        while len(list(Path(folder).glob("sherd-flight-*.json"))) < 2:
            time.sleep(0.05)
    step(model)
    return "it went on"


def test_a_signal_to_one_rank_that_is_blocked_has_all_write_and_go_on(tmp_path):
    found = ends(2, signals_a_blocked_rank, str(tmp_path))
    assert [each.said for each in found] == ["it went on"] * 2
    said = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sherd-flight-*.json"))]
    assert [bool(each["meshes"][0]["waits_s"]) for each in said] == [False, True]
    assert signals_a_blocked_rank.__name__ in said[0]["stack"]
