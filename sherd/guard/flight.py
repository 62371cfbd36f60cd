"""The flight recorder: a log of the collectives of each mesh, and files in which all ranks write theirs on a failure.

A rank that fails, or waits for long, asks the other ranks through the store of the default group to write their logs
too. The board's thread answers, with the stack of the main thread, for a rank whose main thread is busy or stuck. So
the rank that failed can name the ranks that have not come, and say where they are. A process that is gone does not
answer, and is named for that.

    SHERD_FLIGHT_DIR=/records torchrun ... train.py         the folder of the files, not sherd-flights; "" writes none
    SHERD_FLIGHT_SIGNAL=SIGUSR1 torchrun ... train.py       all ranks write when one gets this signal
    sherd doctor /records                                   reads the files
"""

from __future__ import annotations

import contextlib
import itertools
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

from sherd._torch import Store, in_backward, users_line
from sherd.comm.failures import ENDED, ranks_in_short
from sherd.comm.streams import Queued
from sherd.engine import Unit
from sherd.errors import CommError
from sherd.guard.bounded_store import BoundedStore
from sherd.guard.order_check import MOST_STEPS, PlannedCollective, planned
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, Reduce

FOLDER, SIGNAL = "SHERD_FLIGHT_DIR", "SHERD_FLIGHT_SIGNAL"
NOTE_AFTER_S = 30.0
"""A rank that has waited so long says for whom, on stderr."""
QUIETLY = 1 << 32
"""What a question adds to the number of questions that is answered without a record."""
LOOK_EVERY_S = 0.25
"""How often a rank looks for questions of other ranks; less often with more than `OFTEN_UP_TO` ranks."""
OFTEN_UP_TO = 64
ANSWERS_WITHIN = 8
"""How many looks a rank waits for the answers to its question."""
STUCK_AFTER = 0.5
"""Share of the timeout after which a waiting rank asks the others where they are."""
MOST_FRAMES = 8
"""Innermost frames of a stack in an error's text; the file has all."""

NUM_RECENT = 1000
"""Collectives that a log keeps."""
NO_COLLECTIVE = PlannedCollective("", ())
NO_UNIT = -1
"""The id of the unit, in an `Entry`, of a collective outside of units."""

Entry = tuple[int, float, bool, bool, int, int]
"""Collective number, start time, in backward or not, gather or not, unit id, and variant (`MOST_STEPS`).

Ranks that agree give a collective the same number. An entry holds only numbers, so the garbage collector ignores it,
and a steady-state step pays for one tuple per collective; words are made on demand.
"""


class CollectiveLog:
    """The collectives that one rank has started among `ranks`, the ranks of one mesh.

    Attributes:
        key: the same on all ranks of the mesh, and on no other mesh.
        started: the last collectives, oldest first.
        units: the units of the mesh, by id.
        calls: the last collectives outside of units, with their numbers.
        thread: the thread that waited last.
    """

    def __init__(self, key: str, ranks: tuple[int, ...], recorder: Recorder | None) -> None:
        self.key, self.ranks = key, ranks
        self.started: deque[Entry] = deque(maxlen=NUM_RECENT)
        self.units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.calls: deque[tuple[int, PlannedCollective]] = deque(maxlen=NUM_RECENT)
        self.thread = 0
        self._numbers = itertools.count(1)
        self._finished: dict[tuple[int, bool], int] = {}
        """By unit and whether gathers: the newest collective's number when the unit's last ones finished."""
        self._entered, self._wants = 0.0, NO_COLLECTIVE
        self._queued, self._lost = Queued(), ""
        self._recorder = recorder
        if recorder is not None:
            recorder.join(self)

    @property
    def waits_s(self) -> float:
        """How long host or device has been waiting for other ranks; 0 if neither waits."""
        entered = self._entered
        return max(time.monotonic() - entered if entered else 0.0, self._queued.waits_s())

    @property
    def is_entered(self) -> bool:
        """Whether the rank is in a collective of the log, or compares."""
        return bool(self._entered)

    @property
    def device_waits_s(self) -> float | None:
        """How long the device has been waiting for other ranks; None if nothing was ever queued on a device."""
        return self._queued.waits_s() if self._queued else None

    @property
    def newest(self) -> int:
        """The number of the collective that was started last, 0 without one."""
        return self.started[-1][0] if self.started else 0

    def lose(self, text: str) -> None:
        """Raise CommError of this `text` from now on: the groups of the device are broken."""
        self._lost = text

    def forget(self) -> None:
        self._queued.clear()

    def start(self, action: type[Action], unit: Unit, variant: int, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which starts a collective of `unit`. Raises CommError as `run` does."""
        is_gather = action is Gather
        self.started.append((next(self._numbers), time.time(), in_backward(), is_gather, unit.id, variant))
        if unit.streams.in_host_order:
            self.run(action, unit, carry_out)
        else:
            with unit.streams.noting(self._queued):
                self.run(action, unit, carry_out)

    def go_on(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which queues more of a collective that was started. Raises CommError as `run` does."""
        with unit.streams.noting(self._queued):
            self.run(action, unit, carry_out)

    def run(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action` on `unit`, by `carry_out()`, which may wait for the other ranks.

        Raises:
            CommError: a rank has died, or does not come; the text says where the missing ranks are.
        """
        # The same as `waiting`, without a context: every collective of every step comes through here.
        if self._lost:
            raise CommError(self._lost)
        self.thread, self._entered = threading.get_ident(), time.monotonic()
        try:
            carry_out()
        except CommError as error:
            raise self._explained(error) from error.__cause__
        finally:
            self._entered = 0.0
        if (action is Await or action is FinishReduce) and self.started:
            self._finished[unit.id, action is Await] = self.started[-1][0]

    @contextmanager
    def waiting(self, wants: PlannedCollective) -> Iterator[None]:
        """A context for a wait before the collective that the rank `wants`. Raises CommError as `run` does."""
        if self._lost:
            raise CommError(self._lost)
        self.thread, self._entered, self._wants = threading.get_ident(), time.monotonic(), wants
        try:
            yield
        except CommError as error:
            raise self._explained(error) from error.__cause__
        finally:
            self._entered, self._wants = 0.0, NO_COLLECTIVE

    @contextmanager
    def calling(self, call: PlannedCollective) -> Iterator[None]:
        """A context for `call`, a collective outside of units. Raises CommError as `run` does."""
        number = next(self._numbers)
        self.calls.append((number, call))
        self.started.append((number, time.time(), in_backward(), False, NO_UNIT, 0))
        with self.waiting(call):
            yield
        self._finished[NO_UNIT, False] = number

    def failure(self, text: str, absent: bool = False) -> CommError:
        """Returns the error with `text` and where the record is; for `absent` see `Recorder.failed`."""
        return CommError(text if self._recorder is None else self._recorder.failed(self, text, absent))

    def _explained(self, error: CommError) -> CommError:
        return CommError(self._lost) if self._lost else self.failure(str(error.args[0]), absent=True)

    def record(self) -> dict[str, object]:
        words: dict[tuple[bool, int, int], dict[str, object]] = {}
        collectives = []
        for number, when, backward, is_gather, unit_id, variant in list(self.started):
            key = is_gather, unit_id, number if unit_id == NO_UNIT else variant
            collectives.append(
                {
                    "number": number,
                    "time": when,
                    "phase": "backward" if backward else "forward",
                    **(words.get(key) or words.setdefault(key, self._in_words(*key))),
                    "state": "finished" if number <= self._finished.get((unit_id, is_gather), 0) else "started",
                }
            )
        wants = self._wants
        return {
            "mesh": self.key,
            "ranks": self.ranks,
            "waits_s": round(self.waits_s, 3),
            "wants": wants.describe(set()) if wants.parameters else wants.what,
            "collectives": collectives,
        }

    def _in_words(self, is_gather: bool, unit_id: int, variant: int) -> dict[str, object]:
        unit, call = self.units.get(unit_id), dict(self.calls).get(variant)
        if unit_id == NO_UNIT and call is not None:
            return {"unit": "", "what": call.describe(set()), "bytes": 0}
        if unit is None:
            return {"unit": "", "what": "a collective of a model that was deleted", "bytes": 0}
        what = planned(Gather if is_gather else Reduce, unit, variant).what
        return {"unit": unit.name, "what": what, "bytes": _nbytes(unit, is_gather, variant >= MOST_STEPS)}


def _nbytes(unit: Unit, is_gather: bool, precisely: bool) -> int:
    """Returns the bytes that this rank gives to the others: its shards, or its gradients."""
    groups = [weights.group for weights in unit.weights]
    if is_gather:
        dtypes = [group.dtype if precisely else group.compute_dtype for group in groups]
        own = [group.shard_sizes[group.mesh.shard_rank] for group in groups]
        return sum(numel * dtype.itemsize for numel, dtype in zip(own, dtypes, strict=True))
    return sum(sum(group.sizes) * group.reduce_dtype.itemsize for group in groups if group.trainable)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the main thread of a rank is. `asked` numbers the question, `failures` counts the rank's failures so far.

    `line` is the user's. `waits`: host or device wait in a collective of ours.
    """

    asked: int
    line: str
    stack: str
    waits: bool
    failures: int


class Recorder:
    """The recorder of one rank, for all meshes over one default group. `job`, in all files' names, is every rank's."""

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._bounded = BoundedStore(store)  # for the main thread of a rank that fails
        self._logs: list[weakref.ref[CollectiveLog]] = []
        folder = os.environ.get(FOLDER, "sherd-flights")
        self._folder = os.path.abspath(folder) if folder else ""
        own = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.job = store.compare_set("job", "", own).decode()
        self._pause_s = LOOK_EVERY_S * max(1, num_ranks / OFTEN_UP_TO)
        self.timeout_s = timeout.total_seconds()
        self._answered, self._next_look = store.add("asked", 0), 0.0
        self._told = 0
        """What was told of this wait, by this rank or another: 1 after `NOTE_AFTER_S`, 2 once it is stuck."""
        self._num_failures, self._failed_at = 0, -1
        self._failed_with, self._last_words, self._written = "", "", ""
        self._lock = threading.Lock()  # the main thread and the board's thread both answer
        self._signals = _signal_pipe()

    def join(self, log: CollectiveLog) -> None:
        self._logs.append(weakref.ref(log))

    def logs(self) -> list[CollectiveLog]:
        # Over a copy: another thread may add a log meanwhile.
        return [log for joined in list(self._logs) if (log := joined()) is not None]

    def look(self) -> None:
        """Write the record if another rank or a signal asks for it, or this rank waits for long. For the board."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._pause_s
        if self._signals is not None:
            with contextlib.suppress(BlockingIOError):
                if getattr(signal, os.environ[SIGNAL]) in os.read(self._signals, 4096):  # a byte is a signal's number
                    self._store.add("asked", 1)
        asked = self._store.add("asked", 0)  # reads the number; the board's thread may wait for the store
        if asked > self._answered:
            self._told = 1 if asked % QUIETLY == self._answered % QUIETLY else 2  # one rank's question is enough
            self._answer(asked, "another rank, or a signal, has asked for it")
        waiting = max(self.logs(), key=lambda log: log.waits_s, default=None)
        stuck_s = STUCK_AFTER * self.timeout_s
        waits_s = 0.0 if waiting is None else waiting.waits_s
        stage = (waits_s >= min(NOTE_AFTER_S, stuck_s)) + (waits_s >= stuck_s)
        # Ranks come here at once, and one that tells reads the answers of all: only the first one does.
        if waiting is not None and stage > self._told and self._store.add(f"tells/{self._answered}/{stage}", 1) == 1:
            self._tell(waiting, stage == 1)
        self._told = max(stage, self._told) if stage else 0

    def _tell(self, waiting: CollectiveLog, quietly: bool) -> None:
        """Print for whom this rank waits."""
        self._told = 1 if quietly else 2
        line = users_line(sys._current_frames().get(waiting.thread))
        why = f"rank {self._rank} has been waiting for other ranks for {waiting.waits_s:.0f} s" + (
            f" at {line}" * bool(line)
        )
        text = self._ask(waiting.ranks, why, quietly=quietly)
        print(f"sherd: {why}. {text}{'' if quietly else self._written}", file=sys.stderr, flush=True)

    def say_ended(self) -> None:
        """Tell the other ranks that this process ends without an error."""
        with contextlib.suppress(RuntimeError):  # the store has gone before
            self._bounded.set(f"ended/{self._rank}", "")

    def has_ended(self, rank: int) -> bool:
        """Returns whether the process of `rank` has ended without an error."""
        with contextlib.suppress(RuntimeError):
            return self._bounded.check([f"ended/{rank}"])
        return False

    def failed(self, log: CollectiveLog, text: str, absent: bool) -> str:
        """Write the record of this rank, which fails with `text`, and have the others write theirs. Raises nothing.

        Returns `text` with where the record is, and if `absent` ranks may be the cause, which ranks of `log` have not
        come, with their stacks.
        """
        if self._last_words and text.endswith(self._last_words):
            return text
        if text != self._failed_with:  # a transport that has failed raises the same text at each call
            self._failed_with, self._told = text, 2
            self._num_failures += 1
            try:
                self._last_words = self._ask(log.ranks, text, is_failing=True, wait=absent) + self._written
            except Exception as error:  # an error here must not hide why the collective failed
                self._last_words = f"There is no flight record: {type(error).__name__} {error}"
        return f"{text}. {self._last_words}" if self._last_words else text

    def _ask(
        self, ranks: Sequence[int], why: str, is_failing: bool = False, wait: bool = True, quietly: bool = False
    ) -> str:
        """Have all ranks write their records. Returns sentences about those of `ranks` that have not come.

        `quietly`: without records, and also about ranks that wait themselves.
        """
        try:
            answers, missing = self.answers(ranks if wait else (), why, is_failing, QUIETLY if quietly else 1)
        except RuntimeError:
            return "Where the other ranks are is not known: the process group's store, or the link to it, is gone. "
        said: dict[str, list[int]] = {}  # of which ranks each sentence is said
        for rank in sorted({*answers, *missing}):
            where, verb = answers.get(rank), "is"
            if rank in missing and self.has_ended(rank):
                if ENDED not in why:
                    said.setdefault(f"{ENDED}. ", []).append(rank)
                continue
            if rank in missing:
                after_s, verb = ANSWERS_WITHIN * self._pause_s, "was"
                gone = "its process is gone, or its interpreter is blocked"
                said.setdefault(f"has not answered for {after_s:g} s: {gone}. ", []).append(rank)
            if where is not None and not where.waits and where.failures < self._num_failures + (not is_failing):
                frames = "".join(where.stack.splitlines(keepends=True)[-2 * MOST_FRAMES :])
                place = where.line or "no line of yours"
                said.setdefault(f"has not come: it {verb} at {place}\n{frames}\n", []).append(rank)
            elif where is not None and quietly:
                said.setdefault(f"waits too, at {where.line or 'no line of yours'}. ", []).append(rank)
        return "".join(
            f"Rank {ranks[0]} {what}" if len(ranks) == 1 else f"Each of ranks {ranks_in_short(ranks)} {what}"
            for what, ranks in said.items()
        )

    def answers(
        self, ranks: Sequence[int], why: str, is_failing: bool = False, adds: int = 1
    ) -> tuple[dict[int, Whereabouts], set[int]]:
        """Have all ranks write their records. Returns where `ranks` are, and which of them give no new answer in time.

        Raises RuntimeError if the store is gone.
        """
        number, deadline = 0, time.monotonic() + ANSWERS_WITHIN * self._pause_s
        answers: dict[int, Whereabouts] = {}
        with contextlib.suppress(RuntimeError):
            number = self._bounded.add("asked", adds)
        self._answer(number, why, is_failing)
        # Ranks fail together. A rank that failed first may have ended before this one asks, so the answer to its own
        # failure counts too.
        failures = self._num_failures + (not is_failing)
        missing = {rank for rank in ranks if rank != self._rank}
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if self._bounded.check([key := f"where/{rank}"]):
                    answers[rank] = Whereabouts(**json.loads(self._bounded.get(key)))
                    if answers[rank].asked >= number or answers[rank].failures >= failures:
                        missing.discard(rank)
            if (asked := self._bounded.add("asked", 0)) > self._answered:
                self._answer(asked, why)  # another rank asks the same ranks, and this one
            time.sleep(self._pause_s / 25)
        return answers, missing

    def _answer(self, asked: int, why: str, is_failing: bool = False) -> None:
        """Say where this rank is, and write its record, unless it has failed and started nothing since."""
        with self._lock:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            while frame is not None and frame.f_code.co_filename == __file__:
                frame = frame.f_back
            logs = self.logs()
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            waits = any(log.waits_s for log in logs)
            where = Whereabouts(asked, users_line(frame), stack, waits, self._num_failures)
            newest = sum(log.newest for log in logs)
            # The record of a failure stays until the rank goes on: it says more than what is asked for later.
            is_quiet = asked % QUIETLY == self._answered % QUIETLY and asked > self._answered
            if is_failing or (newest != self._failed_at and not is_quiet):
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
            content = {
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
                "meshes": [log.record() for log in sorted(self.logs(), key=lambda log: log.key)],
            }
            os.makedirs(self._folder, exist_ok=True)
            # Renamed when complete: a reader never sees half a record, and the last one survives a full disk.
            with open(f"{path}.part", "w") as file:
                json.dump(content, file)
            os.replace(f"{path}.part", path)
            everyones = path.replace(f"rank{self._rank}.json", "rank*.json")
            self._written = f"What each rank has done is in {everyones}: sherd doctor {os.path.dirname(path)}"
        except Exception as error:  # on a full disk, or because the model is changing meanwhile
            self._written = f"What this rank has done could not be written: {type(error).__name__} {error}"


def _signal_pipe() -> int | None:
    """Returns the read end of a pipe that gets a byte at each signal of the user's choice; None without a choice."""
    name = os.environ.get(SIGNAL, "")
    if not name:
        return None
    chosen = getattr(signal, name, None)
    in_main = threading.current_thread() is threading.main_thread()
    if not isinstance(chosen, signal.Signals) or not in_main or signal.getsignal(chosen) is not signal.SIG_DFL:
        warnings.warn(f"{SIGNAL}={name}: there is none, it is handled, or this is no main thread", stacklevel=2)
        return None
    # The handler in C writes the byte. A handler in Python would not run while the main thread is blocked.
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    if (before := signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(before)  # an event loop's
        warnings.warn(f"{SIGNAL}={name}: an event loop of this process takes the signals", stacklevel=2)
        return None
    signal.signal(chosen, lambda number, frame: None)
    return read_end
