"""The ledger: the last collectives that one rank has started among the ranks of a mesh, and whether it waits for them.

A settled step pays for a tuple of numbers per collective. Words are found when somebody asks.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sherd._torch import in_backward
from sherd.comm.streams import Queued
from sherd.engine import Unit
from sherd.errors import CommError
from sherd.guard.flight import Recorder
from sherd.guard.order_check import MOST_STEPS, PlannedCollective, planned
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, Reduce

NUM_RECENT = 1000

NOTHING = PlannedCollective("", ())

Entry = tuple[int, float, bool, bool, int, int]
"""The collective's number, when it was started, whether in backward, whether it was a gather, the unit's id, and which
of the unit's: numbers, which the garbage collector leaves alone. Ranks that agree give a collective one number."""


class Ledger:
    """The collectives that one rank has started among `ranks`, the mesh of this `key`. A `recorder` writes it, if any.

    Attributes:
        started: the last collectives, oldest first.
        units: those whose collectives it knows, by id.
        thread: the one that has waited last.
    """

    def __init__(self, key: str, ranks: tuple[int, ...], recorder: Recorder | None) -> None:
        self.key, self.ranks = key, ranks
        self.started: deque[Entry] = deque(maxlen=NUM_RECENT)
        self.units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.thread = 0
        self._numbers = itertools.count(1)
        self._finished: dict[tuple[int, bool], int] = {}
        """By unit and whether gathers: the number of the last collective when these were finished."""
        self._entered, self._wants = 0.0, NOTHING
        self._queued, self._lost = Queued(), ""
        self._recorder = recorder
        if recorder is not None:
            recorder.join(self)

    @property
    def waits_s(self) -> float:
        """How long it has been waiting for other ranks, host or device; 0 if it is not."""
        entered = self._entered
        return max(time.monotonic() - entered if entered else 0.0, self._queued.waits_s())

    @property
    def device_waits_s(self) -> float | None:
        """How long its device has been waiting for other ranks, 0 if it is not; None if it has had nothing queued."""
        return self._queued.waits_s() if self._queued else None

    def lose(self, text: str) -> None:
        """Raise CommError of this `text` from now on: the groups of the device are of no more use."""
        self._lost = text

    def forget(self) -> None:
        """Forget what was queued."""
        self._queued.clear()

    @property
    def newest(self) -> int:
        """The number of the collective that was started last, 0 if there is none."""
        return self.started[-1][0] if self.started else 0

    def start(self, action: type[Action], unit: Unit, which: int, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which starts a collective of `unit`. Raises CommError as `run` does."""
        is_gather = action is Gather
        self.started.append((next(self._numbers), time.time(), in_backward(), is_gather, unit.id, which))
        if unit.streams.in_host_order:
            self.run(action, unit, carry_out)
        else:
            with unit.streams.noting(self._queued):
                self.run(action, unit, carry_out)

    def run(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action` on `unit`, by `carry_out()`, which may wait for the other ranks.

        Raises:
            CommError: a rank has died, or did not come; the text says where the ranks are that did not.
        """
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
        """The rank waits for others inside, before the collective that it `wants`. Raises CommError as `run` does."""
        if self._lost:
            raise CommError(self._lost)
        self.thread, self._entered, self._wants = threading.get_ident(), time.monotonic(), wants
        try:
            yield
        except CommError as error:
            raise self._explained(error) from error.__cause__
        finally:
            self._entered, self._wants = 0.0, NOTHING

    def failure(self, text: str) -> CommError:
        """Returns the error with `text` of ranks that all raise it, with where the record is."""
        return CommError(text if self._recorder is None else self._recorder.failed(self, text, absent=False))

    def _explained(self, error: CommError) -> CommError:
        text = str(error.args[0])
        if self._lost:
            return CommError(self._lost)
        return CommError(text if self._recorder is None else self._recorder.failed(self, text, absent=True))

    def record(self) -> dict[str, object]:
        """Returns what a file says of it."""
        words: dict[tuple[bool, int, int], dict[str, object]] = {}
        collectives = []
        for number, when, backward, is_gather, unit_id, which in list(self.started):
            key = is_gather, unit_id, which
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

    def _in_words(self, is_gather: bool, unit_id: int, which: int) -> dict[str, object]:
        unit = self.units.get(unit_id)
        if unit is None:
            return {"unit": "", "what": "a collective of a model that was deleted", "bytes": 0}
        what = planned(Gather if is_gather else Reduce, unit, which).what
        return {"unit": unit.name, "what": what, "bytes": _nbytes(unit, is_gather, which >= MOST_STEPS)}


def _nbytes(unit: Unit, is_gather: bool, precisely: bool) -> int:
    """Returns the bytes that this rank gives to the others: its shards, or its gradients."""
    groups = [weights.group for weights in unit.weights]
    if is_gather:
        dtypes = [group.dtype if precisely else group.compute_dtype for group in groups]
        own = [group.shard_sizes[group.mesh.shard_rank] for group in groups]
        return sum(numel * dtype.itemsize for numel, dtype in zip(own, dtypes, strict=True))
    return sum(sum(group.sizes) * group.reduce_dtype.itemsize for group in groups if group.trainable)
