"""The flight recorder: when a collective fails, or a rank waits for long, each rank writes what it has done to a file.

A rank that fails asks the others, through the store of the default group, to write theirs too. The board's thread
answers for a rank whose main thread is busy or stuck, with the stack of that thread. So the rank that failed can name
the one which has not come, and say where that is. A process that is gone does not answer, and is named for that.

    SHERD_FLIGHT_DIR=/records torchrun ... train.py         where files go; "" writes none
    SHERD_FLIGHT_SIGNAL=SIGUSR1 torchrun ... train.py       all ranks write when one gets this signal
    sherd doctor /records                                   reads them
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

from sherd._torch import Store, users_line
from sherd.guard.bounded_store import BoundedStore

FOLDER, SIGNAL = "SHERD_FLIGHT_DIR", "SHERD_FLIGHT_SIGNAL"
LOOK_EVERY_S = 0.25
"""A rank looks this often whether it is asked; less often if there are more than `OFTEN_UP_TO` ranks."""
OFTEN_UP_TO = 64
ANSWERS_WITHIN = 8
"""A rank that has asked waits as many looks for the answers."""
STUCK_AFTER = 0.5
"""Share of the timeout after which a rank that waits asks the others where they are."""
MOST_FRAMES = 8
"""Innermost lines of a stack in an error's text; the file has all."""


class Source(Protocol):
    """The collectives of one rank among the ranks of a mesh; `key` is the same on all of them, and no other's."""

    key: str
    ranks: tuple[int, ...]

    @property
    def waits_s(self) -> float:
        """How long it has been waiting for other ranks; 0 if it is not."""

    @property
    def newest(self) -> int:
        """The number of the collective that it has started last, 0 if there is none."""

    @property
    def device_waits_s(self) -> float | None:
        """How long its accelerator has been waiting for other ranks, 0 if it is not; None if it has none."""

    def record(self) -> dict[str, object]:
        """Returns its collectives, and what it is doing, as JSON takes it."""

    def lose(self, text: str) -> None:
        """Have its next collective raise CommError of this `text`."""

    def forget(self) -> None:
        """Let go of what it holds of its accelerator."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank is: the `stack` of its main thread, the user's `line`, whether it `waits` in a collective of ours,
    and how many `failures` it has had there. `asked` numbers the question that it answers."""

    asked: int
    line: str
    stack: str
    waits: bool
    failures: int


class Recorder:
    """The recorder of one rank, for all meshes over one default group.

    Files are named by the `job`, which is the same on all ranks.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._bounded = BoundedStore(store)  # for what a rank does that fails
        self._joined: list[weakref.ref[Source]] = []
        folder = os.environ.get(FOLDER, ".")
        self._folder = os.path.abspath(folder) if folder else ""
        own = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.job = store.compare_set("job", "", own).decode()
        self._pause_s = LOOK_EVERY_S * max(1, num_ranks / OFTEN_UP_TO)
        self.timeout_s = timeout.total_seconds()
        self._answered, self._next_look, self._has_warned = store.add("asked", 0), 0.0, False
        self._num_failures, self._failed_at = 0, -1
        self._failed_with, self._last_words, self._written = "", "", ""
        self._lock = threading.Lock()
        self._bell = _bell()

    def join(self, source: Source) -> None:
        """Record `source` from now on, as long as it exists."""
        self._joined.append(weakref.ref(source))

    def sources(self) -> list[Source]:
        """Returns the sources that still exist. Others may join meanwhile, on another thread."""
        return [source for joined in list(self._joined) if (source := joined()) is not None]

    def look(self) -> None:
        """Write what another rank, a signal, or a wait that has become long asks for. The board's thread calls it."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._pause_s
        if self._bell is not None and _has_rung(self._bell):
            self._store.add("asked", 1)
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._has_warned = True  # one rank's question is enough
            self._answer(asked, "another rank, or a signal, has asked for it")
        waiting = max(self.sources(), key=lambda source: source.waits_s, default=None)
        if waiting is None or waiting.waits_s < STUCK_AFTER * self.timeout_s:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            why = f"rank {self._rank} has been waiting for other ranks for {waiting.waits_s:.0f} s"
            said = self._ask(waiting.ranks, why)
            print(f"sherd: {why}. {said}{self._written}", file=sys.stderr, flush=True)

    def failed(self, source: Source, text: str, absent: bool) -> str:
        """Write the record of this rank, which fails with `text`, and have the others write theirs.

        Returns `text`, followed by where the record is and, if `absent` ranks may be the cause, by which ranks of
        `source` are not there, with their stacks. Raises nothing.
        """
        if self._last_words and text.endswith(self._last_words):
            return text
        if text != self._failed_with:  # a transport that has failed says so again at each call
            self._failed_with, self._has_warned = text, True
            self._num_failures += 1
            try:
                self._last_words = self._ask(source.ranks, text, is_failing=True, wait=absent) + self._written
            except Exception as error:  # whatever goes wrong here must not hide why the collective failed
                self._last_words = f"There is no flight record: {type(error).__name__} {error}"
        return f"{text}. {self._last_words}" if self._last_words else text

    def silent(self, ranks: Sequence[int], why: str) -> set[int]:
        """Have all ranks write their records; returns those of `ranks` that do not answer. Raises RuntimeError if the
        store is gone."""
        _, missing = self._answers(ranks, why)
        return missing

    def _ask(self, ranks: Sequence[int], why: str, is_failing: bool = False, wait: bool = True) -> str:
        """Have all ranks write their records; returns the sentences about those of `ranks` that are not there."""
        try:
            found, missing = self._answers(ranks if wait else (), why, is_failing)
        except RuntimeError:
            return "Where the other ranks are is not known: the process group's store, or the link to it, is gone. "
        sentences = []
        for rank in sorted({*found, *missing}):
            where, verb = found.get(rank), "is"
            if rank in missing:
                after_s, verb = ANSWERS_WITHIN * self._pause_s, "was"
                why = "its process is gone, or its interpreter is blocked"
                sentences.append(f"Rank {rank} has not answered for {after_s:g} s: {why}. ")
            if where is not None and not where.waits and where.failures < self._num_failures + (not is_failing):
                frames = "".join(where.stack.splitlines(keepends=True)[-2 * MOST_FRAMES :])
                place = where.line or "no line of yours"
                sentences.append(f"Rank {rank} has not come: it {verb} at {place}\n{frames}\n")
        return "".join(sentences)

    def _answers(
        self, ranks: Sequence[int], why: str, is_failing: bool = False
    ) -> tuple[dict[int, Whereabouts], set[int]]:
        """Have all ranks write their records; returns where those of `ranks` said that they are, and those of which
        nothing new was heard in time. Raises RuntimeError if the store is gone."""
        number, deadline = 0, time.monotonic() + ANSWERS_WITHIN * self._pause_s
        found: dict[int, Whereabouts] = {}
        with contextlib.suppress(RuntimeError):
            number = self._bounded.add("asked", 1)
        self._answer(number, why, is_failing)
        # Ranks fail together, and one that has failed may have ended before this one asks.
        failures = self._num_failures + (not is_failing)
        missing = {rank for rank in ranks if rank != self._rank}
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if self._bounded.check([key := f"where/{rank}"]):
                    found[rank] = Whereabouts(**json.loads(self._bounded.get(key)))
                    if found[rank].asked >= number or found[rank].failures >= failures:
                        missing.discard(rank)
            if (asked := self._bounded.add("asked", 0)) > self._answered:
                self._answer(asked, why)  # another rank waits for the same ones
            time.sleep(self._pause_s / 25)
        return found, missing

    def _answer(self, asked: int, why: str, is_failing: bool = False) -> None:
        """Say where this rank is, and write its record, unless it has failed and started nothing since."""
        with self._lock:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            while frame is not None and frame.f_code.co_filename == __file__:
                frame = frame.f_back
            sources = self.sources()
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            waits = any(source.waits_s for source in sources)
            where = Whereabouts(asked, users_line(frame), stack, waits, self._num_failures)
            newest = sum(source.newest for source in sources)
            if is_failing or newest != self._failed_at:
                self._write(why, where, is_failing)
            self._failed_at = newest if is_failing else self._failed_at
            self._answered = max(self._answered, asked)
            with contextlib.suppress(RuntimeError):
                self._bounded.set(f"where/{self._rank}", json.dumps(asdict(where)))

    def _write(self, why: str, where: Whereabouts, is_failing: bool) -> None:
        if not self._folder:
            return
        path = os.path.join(self._folder, f"sherd-flight-{self.job}-rank{self._rank}.json")
        try:
            part = {
                "sherd flight record": 1,
                "job": self.job,
                "rank": self._rank,
                "num_ranks": self._num_ranks,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "time": time.time(),
                "why": why,
                "line": where.line,
                "stack": where.stack,
                "failed": is_failing,
                "meshes": [source.record() for source in sorted(self.sources(), key=lambda source: source.key)],
            }
            os.makedirs(self._folder, exist_ok=True)
            with open(f"{path}.part", "w") as file:
                json.dump(part, file)
            os.replace(f"{path}.part", path)
            everyones = path.replace(f"rank{self._rank}.json", "rank*.json")
            self._written = f"What each rank has done is in {everyones}: sherd doctor {os.path.dirname(path)}"
        except Exception as error:  # on a full disk, or because the model is changing meanwhile
            self._written = f"What this rank has done could not be written: {type(error).__name__} {error}"


def _bell() -> int | None:
    """Returns the end of a pipe from which a byte can be read after the signal that the user has chosen, if any.

    A handler of Python's would not run while the main thread is blocked; the byte is written by the handler in C. A
    signal that somebody handles is left alone.
    """
    name = os.environ.get(SIGNAL, "")
    if not name:
        return None
    chosen = getattr(signal, name, None)
    in_main = threading.current_thread() is threading.main_thread()
    if not isinstance(chosen, signal.Signals) or not in_main or signal.getsignal(chosen) is not signal.SIG_DFL:
        warnings.warn(f"{SIGNAL}={name}: there is none, it is handled, or this is no main thread", stacklevel=2)
        return None
    heard, rings = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(rings, False)
    if (before := signal.set_wakeup_fd(rings, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(before)  # an event loop's
        warnings.warn(f"{SIGNAL}={name}: an event loop of this process takes the signals", stacklevel=2)
        return None
    signal.signal(chosen, lambda number, frame: None)
    return heard


def _has_rung(bell: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        chosen = getattr(signal, os.environ[SIGNAL])
        return chosen in os.read(bell, 4096)  # a byte is the number of a signal
    return False
