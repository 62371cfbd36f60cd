"""The board: ranks that cannot go on tell each other where they stand, through the store of the default group.

Nothing is written while ranks agree. A rank that wants to leave the path which all have taken puts an `Inquiry` on the
board. A thread of each rank that has been blocked in a collective for a while reads inquiries, and answers for it with
the collective that it has started. The rank that inquires then knows that the others will not come, and declares what
went wrong; the threads hear of it, and the blocked ranks raise it too. The same thread serves the flight recorder.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from sherd._torch import Store, store_beside, timeout_of
from sherd.comm.groups import is_destroyed
from sherd.guard.bounded_store import BoundedStore
from sherd.guard.flight import OFTEN_UP_TO, Recorder
from sherd.guard.watchdog import Watchdog

LOOK_EVERY_S = 0.05
"""The thread looks this often whether its rank is blocked, and at the board if it is."""
FEW = 4
"""So many ranks connect to the store once more, for the board. The process that has the store holds a connection of
each, so more ranks share the one of the default group, where a look waits while the main thread waits for a key; and
they look every `SELDOM_S`, less often if there are more than `OFTEN_UP_TO`."""
SELDOM_S = 1.0
INQUIRE_AFTER_S = 0.2
"""A rank that waits so long for the others to compare asks where they are; later if they look seldom."""
MOST_INQUIRERS = 4
"""If there are more than `FEW` ranks, so many of those that wait at one position ask, and declare it to all."""
HEARD_WITHIN_S = 2.0
"""A rank that declares what went wrong waits this long for the others to hear of it, longer if they look seldom."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank has come: it has `issued` collectives since the last of `agreements`. Ranks of a mesh at equal
    positions have the same past."""

    agreements: int = 0
    issued: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an inquiry: how many collectives the rank has `issued`, and which `collective` of these it started
    where the inquirer stands (what it does, its parameters and terms, the user's line); None if it waits to compare,
    too."""

    issued: int
    collective: tuple[str, tuple[str, ...], tuple[str, ...], str] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure in words, and how many collectives the rank that has come farthest has `issued`."""

    text: str
    issued: int


class Party(Protocol):
    """One rank among those of a mesh."""

    key: str
    """The same on all ranks of the mesh, and on no other's."""

    @property
    def blocked_s(self) -> float:
        """How long its rank has been in a collective, of which it may not come out by itself; 0 if it is not."""

    def answer(self, position: Position) -> Answer | None:
        """Returns the answer to a rank that stands at `position` and wants to leave the path; None as long as this rank
        has not come there. Raises LookupError if it is past it in agreement."""

    def hear(self, failure: Failure) -> None:
        """Take note of what went wrong."""


class Inquiry:
    """A question that is on the board, as its rank sees it."""

    def __init__(self, store: Store, number: int, heard_within_s: float = HEARD_WITHIN_S) -> None:
        self._store, self._key, self._heard_within_s = store, str(number), heard_within_s

    def answers(self, ranks: Sequence[int]) -> dict[int, Answer]:
        """Returns the answers that have come, by rank."""
        keys = {rank: f"{self._key}/answer/{rank}" for rank in ranks}
        return {rank: _answer_of(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def declare(self, failure: Failure, ranks: Sequence[int]) -> None:
        """Tell the other `ranks` what went wrong, and wait until they have heard it."""
        self._store.set(f"{self._key}/declared", json.dumps(asdict(failure)))
        missing, deadline = set(ranks), time.monotonic() + self._heard_within_s
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not self._store.check([f"{self._key}/heard/{rank}"])}
            time.sleep(LOOK_EVERY_S / 5)


class Board:
    """The board of one default group, as one rank sees it; its `recorder` knows the ledgers of all meshes.

    Attributes:
        pause_s: how often the rank looks at it.
        patience_s: how long a rank waits for the others to compare before it inquires.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group, self._store, self._rank, self.num_ranks = weakref.ref(group), store, group.rank(), group.size()
        self._is_few = self.num_ranks <= FEW
        self.pause_s = LOOK_EVERY_S if self._is_few else SELDOM_S * max(1, self.num_ranks / OFTEN_UP_TO)
        devices = (torch.device("cpu"), torch.accelerator.current_accelerator())
        timeouts = (timeout_of(group, device) for device in devices if device is not None)
        timeout = next((each for each in timeouts if each is not None), dist.default_pg_timeout)
        self._bounded = BoundedStore(store)  # for the main thread, which must not wait for ever
        self.recorder = Recorder(store, self._rank, self.num_ranks, timeout)
        self._watchdog = Watchdog(self.recorder, store, self._rank)
        self._has_store = True
        self._parties: weakref.WeakValueDictionary[str, Party] = weakref.WeakValueDictionary()
        self._open: dict[int, tuple[str, Position]] = {}
        self._num_read = 0
        turn_s = 0.0 if self._is_few else self.pause_s * self._rank / self.num_ranks
        self.patience_s = INQUIRE_AFTER_S if self._is_few else self.pause_s + turn_s
        threading.Thread(target=_watch, args=(weakref.ref(self), turn_s), name="sherd board", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the group was destroyed, as a program does before it ends, and the store may go at any moment; or the
        store has gone, and there is no device to watch."""
        group = self._group()
        return group is None or is_destroyed(group) or not (self._has_store or self._watchdog.is_on)

    def join(self, party: Party) -> None:
        """Answer for `party` from now on, as long as it exists."""
        self._parties[party.key] = party

    def inquire(self, key: str, position: Position) -> Inquiry | None:
        """Put on the board that this rank's party of this key wants to leave the path at `position`; None if others
        have, and will declare what comes of it."""
        at = f"inquirers/{key}/{position.agreements}/{position.issued}"
        if not self._is_few and self._bounded.add(at, 1) > MOST_INQUIRERS:
            return None
        number = self._bounded.add("number", 1)
        self._bounded.set(str(number), json.dumps([key, asdict(position)]))
        return Inquiry(self._bounded, number, max(HEARD_WITHIN_S, 2 * self.pause_s))

    def look(self) -> None:
        """Serve recorder and watchdog; and answer what can be answered, if one of the parties is blocked."""
        try:
            if self._has_store:
                self._look_at_store()
        except RuntimeError:  # it ends with its server, which may be the process of rank 0: nobody is left to ask
            self._has_store = False
        self._watchdog.look(self._has_store)

    def close(self) -> None:
        """The group was destroyed: nothing is watched any more."""
        self._watchdog.close()

    def _look_at_store(self) -> None:
        self.recorder.look()
        if any(party.blocked_s > self.pause_s for party in list(self._parties.values())):
            while self._store.check([str(self._num_read + 1)]):
                self._num_read += 1
                key, position = json.loads(self._store.get(str(self._num_read)))
                self._open[self._num_read] = key, Position(**position)
            for number, (key, where) in list(self._open.items()):
                if self._is_settled(number, self._parties.get(key), where):
                    del self._open[number]

    def _is_settled(self, number: int, party: Party | None, position: Position) -> bool:
        """Answer one inquiry. Returns whether nothing remains to be said or heard."""
        if party is None:
            return True
        own = f"{number}/answer/{self._rank}"
        try:
            answer = party.answer(position)
        except LookupError:
            return True
        if answer is not None and not self._store.check([own]):
            self._store.set(own, json.dumps(asdict(answer)))
        if not self._store.check([f"{number}/declared"]):
            return False
        party.hear(Failure(**json.loads(self._store.get(f"{number}/declared"))))
        self._store.set(f"{number}/heard/{self._rank}", "")
        return True


def _answer_of(said: bytes) -> Answer:
    fields = json.loads(said)
    if fields["collective"] is not None:
        what, parameters, terms, line = fields["collective"]
        fields["collective"] = what, tuple(parameters), tuple(terms), line
    return Answer(**fields)


def _watch(board: weakref.ref[Board], turn_s: float) -> None:
    time.sleep(turn_s)  # so that ranks look one after the other
    while (living := board()) is not None and not living.is_over:
        living.look()
        pause = living.pause_s
        del living
        time.sleep(pause)
    if living is not None:
        living.close()


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, Board | None] = weakref.WeakKeyDictionary()


def board_of(group: dist.ProcessGroup) -> Board | None:
    """Returns the board of `group`, the default one; None where its ranks have no store that connects processes."""
    if group not in _boards:
        store = store_beside(group, "sherd/board", connects=group.size() <= FEW)
        _boards[group] = None if store is None else Board(group, store)
    return _boards[group]
