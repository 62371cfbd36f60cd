"""The board: ranks that cannot go on tell each other where they stand, through the store of the default group.

Nothing is written while ranks agree. A rank that wants to leave the path of all ranks puts a query on the board. A
thread of each rank that has been blocked in a collective for a while reads queries, and answers with the collective
that its rank has started. The asking rank then knows that the others will not come, and declares the divergence. The
threads read that, and the blocked ranks raise it too. The same thread serves the flight recorder and the watchdog.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from typing import Protocol

import torch
import torch.distributed as dist

from sherd._torch import Store, store_beside, timeout_of
from sherd.comm.failures import ends_well
from sherd.comm.groups import is_destroyed
from sherd.errors import CommError
from sherd.guard.bounded_store import ANSWERS_WITHIN_S, BoundedStore
from sherd.guard.flight import OFTEN_UP_TO, Recorder
from sherd.guard.order_check import PlannedCollective
from sherd.guard.watchdog import Watchdog

LOOK_EVERY_S = 0.05
"""How often the thread looks whether its rank is blocked, and if so, at the board."""
FEW = 4
"""Up to this number of ranks, each opens a connection of its own to the store for the board.

The process that has the store holds every connection, so more ranks share the default group's, where a look waits while
the main thread waits for a key. They look every `SELDOM_S`, less often with more than `OFTEN_UP_TO` ranks.
"""
SELDOM_S = 1.0
ASK_AFTER_S = 0.2
"""How long a rank waits for the others to compare before it asks where they are; longer if they look seldom."""
MOST_QUERIES = 4
"""With more than `FEW` ranks, the most ranks that ask at one position; they declare the divergence to all."""
HEARD_WITHIN_S = 2.0
"""How long a rank that declares a divergence waits for the others to read it; longer if they look seldom."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come: comparisons that all ranks passed, and collectives `issued` since the last of them.

    Ranks of a mesh at equal positions have the same past.
    """

    agreements: int = 0
    issued: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """How many collectives a rank has `issued` since the last comparison, and which one where the asking rank stands.

    `collective` is None if the rank itself waits for a comparison.
    """

    issued: int
    collective: PlannedCollective | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """A rank's declaration: the error's text, and how many collectives the foremost rank has `issued`."""

    text: str
    issued: int


class Participant(Protocol):
    """One rank among the ranks of a mesh, for the board."""

    key: str
    """The key of the mesh in the store: all its ranks have it, and no other mesh does."""

    @property
    def blocked_s(self) -> float:
        """How long the rank has been in a collective that may not end by itself; 0 outside of one."""

    def answer(self, position: Progress) -> Answer | None:
        """Returns the answer to a rank that stands at `position`; None while this rank has not reached it.

        Raises LookupError if all ranks have passed a comparison since.
        """

    def hear(self, divergence: Divergence) -> None:
        """Note what another rank has declared."""


class Query:
    """A question of this rank on the board."""

    def __init__(self, store: BoundedStore, number: int, heard_within_s: float) -> None:
        self._store, self._key, self._heard_within_s = store, str(number), heard_within_s

    def answers(self, ranks: Sequence[int]) -> dict[int, Answer]:
        keys = {rank: f"{self._key}/answer/{rank}" for rank in ranks}
        return {rank: _answer_in(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def declare(self, divergence: Divergence, ranks: Sequence[int]) -> None:
        """Tell the other `ranks` of a divergence, and wait until they have read it."""
        self._store.set(f"{self._key}/declared", json.dumps(asdict(divergence)))
        missing, deadline = set(ranks), time.monotonic() + self._heard_within_s
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not self._store.check([f"{self._key}/heard/{rank}"])}
            time.sleep(LOOK_EVERY_S / 5)


class Board:
    """The board of one default group, as one rank sees it.

    Attributes:
        recorder: the flight recorder of this rank.
        watchdog: the watchdog of this rank.
        pause_s: how often the rank looks at the board.
        patience_s: how long a rank waits for the others to compare before it asks.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group, self._store, self._rank, num_ranks = weakref.ref(group), store, group.rank(), group.size()
        self._is_few = num_ranks <= FEW
        self.pause_s = LOOK_EVERY_S if self._is_few else SELDOM_S * max(1, num_ranks / OFTEN_UP_TO)
        devices = (torch.device("cpu"), torch.accelerator.current_accelerator())
        timeouts = (timeout_of(group, device) for device in devices if device is not None)
        timeout = next((known for known in timeouts if known is not None), dist.default_pg_timeout)
        self._bounded = BoundedStore(store)  # for the main thread, which must not wait forever
        self.recorder = Recorder(store, self._rank, num_ranks, timeout)
        self.watchdog = Watchdog(self.recorder, store, self._rank)
        self._has_store = True
        self._participants: weakref.WeakValueDictionary[str, Participant] = weakref.WeakValueDictionary()
        self._open: dict[int, tuple[str, Progress]] = {}
        """Queries that this rank has not answered, or whose outcome is not declared yet."""
        self._num_read = 0
        turn_s = 0.0 if self._is_few else self.pause_s * self._rank / num_ranks
        self.patience_s = ASK_AFTER_S if self._is_few else self.pause_s + turn_s
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), turn_s), name="sherd board", daemon=True)
        thread.start()
        atexit.register(_end, thread)
        # Also in processes that multiprocessing has forked, which skip atexit.
        Finalize(None, _say_end, args=(weakref.ref(self),), exitpriority=0)

    @property
    def is_over(self) -> bool:
        """Whether the group was destroyed, or the store is gone and no device is watched."""
        # A program destroys the group before it ends, and from then on the store may go at any moment.
        group = self._group()
        return group is None or is_destroyed(group) or not (self._has_store or self.watchdog.is_on)

    def join(self, participant: Participant) -> None:
        self._participants[participant.key] = participant

    def ask(self, key: str, position: Progress) -> Query | None:
        """Ask the ranks of the participant with `key` where they are: this rank wants to leave the path at `position`.

        Returns the query; None if enough other ranks ask, which will declare the outcome.
        """
        at = f"inquirers/{key}/{position.agreements}/{position.issued}"
        if not self._is_few and self._bounded.add(at, 1) > MOST_QUERIES:
            return None
        number = self._bounded.add("number", 1)
        self._bounded.set(str(number), json.dumps([key, asdict(position)]))
        return Query(self._bounded, number, max(HEARD_WITHIN_S, 2 * self.pause_s))

    def look(self) -> None:
        """Serve recorder and watchdog; answer queries if one of the participants is blocked."""
        try:
            if self._has_store:
                self._look_at_store()
        except RuntimeError:  # the store ends with its process, which may be rank 0's: no store is left to ask
            self._has_store = False
        self.watchdog.look(self._has_store)

    def _look_at_store(self) -> None:
        self.recorder.look()
        if any(participant.blocked_s > self.pause_s for participant in list(self._participants.values())):
            while self._store.check([str(self._num_read + 1)]):
                self._num_read += 1
                key, position = json.loads(self._store.get(str(self._num_read)))
                self._open[self._num_read] = key, Progress(**position)
            for number, (key, where) in list(self._open.items()):
                if self._is_settled(number, self._participants.get(key), where):
                    del self._open[number]

    def _is_settled(self, number: int, participant: Participant | None, position: Progress) -> bool:
        """Answer one query. Returns whether nothing remains to be answered or read."""
        if participant is None:
            return True
        own = f"{number}/answer/{self._rank}"
        try:
            answer = participant.answer(position)
        except LookupError:
            return True
        if answer is not None and not self._store.check([own]):
            self._store.set(own, json.dumps(asdict(answer)))
        if not self._store.check([f"{number}/declared"]):
            return False
        participant.hear(Divergence(**json.loads(self._store.get(f"{number}/declared"))))
        self._store.set(f"{number}/heard/{self._rank}", "")
        return True


def _answer_in(written: bytes) -> Answer:
    fields = json.loads(written)
    collective = fields["collective"]
    if collective is not None:
        # JSON has no tuples, and collectives are compared by their fields.
        collective["parameters"], collective["terms"] = tuple(collective["parameters"]), tuple(collective["terms"])
        collective = PlannedCollective(**collective)
    return Answer(fields["issued"], collective)


_process_ends = threading.Event()


def _watch(board: weakref.ref[Board], pause: float) -> None:
    """Look at `board` until it is over, at first after `pause`, so that ranks look one after the other."""
    while not _process_ends.wait(pause) and (living := board()) is not None:
        if living.is_over:
            living.watchdog.close()
            return
        living.look()
        pause = living.pause_s
        del living  # or the thread would keep the board, and with it the group, alive


def _say_end(board: weakref.ref[Board]) -> None:
    if (living := board()) is not None and ends_well():
        living.recorder.say_ended()


def _end(thread: threading.Thread) -> None:
    _process_ends.set()
    with contextlib.suppress(CommError):  # the watchdog's, which it raises in the main thread, and has printed
        thread.join(ANSWERS_WITHIN_S)  # it may be in a call of the store, which never ends over a link that is cut


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, Board | None] = weakref.WeakKeyDictionary()


def board_of(group: dist.ProcessGroup) -> Board | None:
    """Returns the board of `group`, the default one; None if its store connects no processes."""
    if group not in _boards:
        store = store_beside(group, "sherd/board", connects=group.size() <= FEW)
        _boards[group] = None if store is None else Board(group, store)
    return _boards[group]
