"""What every test of the command finds ready."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sherd.cli import main as cli
from sherd.train import launch


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """A hang-up does what it does in a terminal, also in a test run under nohup, which ignores it for all processes
    that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a few kilobytes, so regular that a few steps lower the loss."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(8):
        (folder / f"{n}.txt").write_text(f"the {n} quick brown foxes jump over the lazy dog. " * 12)
    return str(folder)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that the test is in, away from any run, with a text of some kilobytes; the test is no rank."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("some words, and some more of them. " * 500)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """What would have been started: (number of ranks, words)."""
    calls: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(launch, "start", lambda num_ranks, words, *rest: calls.append((num_ranks, words)) or 0)
    return calls


@pytest.fixture
def refused(elsewhere: Path, started: list[Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused("train", "--what")`: the one line in which these words are refused, before anything is started."""

    def refuse(*words: object) -> str:
        before = len(started)
        assert cli.main([str(word) for word in words]) == 2, words
        said = capsys.readouterr()
        assert said.out == "", words
        assert said.err.startswith(f"sherd {words[0]}: "), words
        assert said.err.count("\n") == 1, words
        assert len(started) == before, words
        return said.err

    return refuse
