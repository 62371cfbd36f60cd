"""The guard: no rank starts a collective that the others do not start.

All ranks of a mesh must gather and reduce the same units in the same order. Otherwise they read each other's bytes as
their own, or wait until a timeout. The first time that a step takes a way, ranks compare before each collective. From
then on a rank compares only where it takes another way than the last time (`Path`), so a settled step costs nothing.

If all ranks have changed alike, the comparison says so. If not, the others are blocked in the collective that came next
the last time, and say so on the board (`Board`). The rank that left then declares what it wanted and where the others
are; it takes part in the collectives that they have started, with what it has, so that they come out of them; and all
of them raise the same error.

    TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ... train.py        compares before every collective
    CommPolicy(divergence="trust")                              compares nothing
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from sherd._torch import adopt_timeout
from sherd.comm.board import LOOK_EVERY_S, Answer, Board, Failure, Inquiry, Position, board_of
from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_beside, group_of
from sherd.comm.mesh import DataMesh
from sherd.engine.run.call_stack import line_of, users_frame
from sherd.engine.run.order_check import PlannedCollective, agree, different, planned
from sherd.engine.run.unit import Unit
from sherd.errors import CommError
from sherd.schedule.actions import Action, Await, Discard, FinishReduce, Free, Gather, Reduce
from sherd.schedule.path import Path
from sherd.schedule.state import Live

Carry = Callable[[Unit], None]
"""Carries out an action on a unit."""
Table = dict[type[Action], Carry]

NUM_RECENT = 64
"""Collectives that a rank remembers: more than it starts before it waits for one."""
INQUIRE_AFTER_S = 0.2
"""A rank that waits so long for the others to compare asks where they are."""


class Guard:
    """The guard of one mesh's ranks, as one rank sees it; for all units on that mesh, of any model."""

    def __init__(self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, board: Board) -> None:
        self.key = f"{parent.group_name} {ranks}"
        self._parent, self._ranks, self._device = weakref.ref(parent), ranks, device
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._path: Path[tuple[type[Action], int, bool]] = Path()
        self._position = Position()
        self._recent: deque[tuple[int, int, bool, int]] = deque(maxlen=NUM_RECENT)
        """Position, whether it was a gather, and the unit's id: numbers, which the garbage collector leaves alone."""
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._is_asking, self._entered, self._thread = False, 0.0, 0
        self._failure: Failure | None = None
        self._board = board
        board.join(self)

    def watch(self, unit: Unit) -> None:
        """Know `unit`, one of the mesh's."""
        self._units[unit.id] = unit

    def begin(self) -> None:
        """A pass begins: the forward of a root."""
        self._path.begin()

    def starts(self, action: type[Action], unit: Unit, do: Table) -> None:
        """Carry out `action`, a collective of `unit`, as all ranks do.

        Raises:
            CommError: not all ranks do, or one has died.
        """
        self._raise_if_failed(do)
        self._path.take((action, unit.id, unit.in_full_precision))
        if not self._path.is_sure or _is_detailed():
            self._ask(planned(action, unit, line_of(users_frame(sys._getframe()))), do)
        here = self._position
        self._recent.append((here.agreements, here.issued, action is Gather, unit.id))
        self._position = Position(here.agreements, here.issued + 1)
        self.waits(action, unit, do)

    def waits(self, action: type[Action], unit: Unit, do: Table) -> None:
        """Carry out `action`, which may wait for the other ranks.

        Raises:
            CommError: while it waited, it was declared that ranks went different ways.
        """
        self._thread, self._entered = threading.get_ident(), time.monotonic()
        try:
            do[action](unit)
        finally:
            self._entered = 0.0
        self._raise_if_failed(do)

    def _raise_if_failed(self, do: Table) -> None:
        if self._failure is not None:
            with contextlib.suppress(CommError):
                self._release(self._failure.issued - self._position.issued, do)
            raise CommError(self._failure.text)

    # The comparison

    def _ask(self, collective: PlannedCollective, do: Table) -> None:
        self._is_asking = True
        inquiry: Inquiry | None = None

        def wait(work: dist.Work) -> None:
            nonlocal inquiry
            begun, pause = time.monotonic(), 2e-5
            while not work.is_completed():
                time.sleep(pause)
                self._raise_if_failed(do)
                pause = min(2 * pause, 2e-3 if inquiry is None else LOOK_EVERY_S)
                if time.monotonic() - begun < INQUIRE_AFTER_S:
                    continue
                if inquiry is None:
                    inquiry = self._board.inquire(self.key, self._position)
                self._give_up_if_alone(inquiry, collective)
            work.wait()

        try:
            agree(self._group(), collective, self._position.issued, wait)
        except CommError:
            self._path = Path()  # ranks have taken different steps to here
            raise
        finally:
            self._is_asking = False
            self._position = Position(self._position.agreements + 1)
        self._path.agree()

    def _group(self) -> dist.ProcessGroup:
        """Returns the group that ranks compare over. It is used for nothing else, so that a comparison meets only other
        comparisons, and it is one of the host, which is what waits."""
        parent, is_host = self._parent(), self._device.type == "cpu"
        assert parent is not None, "the mesh of a unit holds it"
        if is_host:
            adopt_timeout(parent)
        # One that was made at DETAIL keeps the host waiting from the call on, when the level is no longer that.
        purpose = "order-detail" if _is_detailed() else "order"
        with named("the first comparison of what ranks are about to do", parent):
            return group_beside(parent, purpose, self._ranks, self._device, None if is_host else "gloo")

    def _give_up_if_alone(self, inquiry: Inquiry, collective: PlannedCollective) -> None:
        """Declare a failure, if all other ranks have said where they are and some will not come."""
        answers = inquiry.answers(self._peers)
        started = {rank: PlannedCollective(*each.collective) for rank, each in answers.items() if each.collective}
        if not started or len(answers) < len(self._peers):
            return
        known = [rank for rank in self._ranks if rank in started or rank == dist.get_rank()]
        text = different(known, [started.get(rank, collective) for rank in known])
        self._failure = Failure(text, max(answer.issued for answer in answers.values()))
        inquiry.declare(self._failure, self._peers)

    def _release(self, number: int, do: Table) -> None:
        """Take part in the next `number` collectives, which others have started, so that they do not wait for ever."""
        number = max(number, 0)
        self._position = Position(self._position.agreements, self._position.issued + number)
        for action, unit_id, _ in islice(self._path.expected(), number):
            unit = self._units.get(unit_id)
            if unit is None:
                return
            if action is Reduce:
                do[Discard](unit)
                do[Reduce](unit)
                do[Discard](unit)
            else:
                if unit.live is Live.GATHERING:
                    do[Await](unit)
                do[Free](unit)
                do[Gather](unit)
                do[Await](unit)
                do[Free](unit)

    # What the board asks

    @property
    def is_blocked(self) -> bool:
        """Whether a wait has lasted for a while. On an accelerator it is the device that waits, so nobody knows."""
        has_entered = self._entered and time.monotonic() - self._entered > LOOK_EVERY_S
        return bool(has_entered) or self._is_asking or self._device.type != "cpu"

    def answer(self, position: Position) -> Answer | None:
        """Returns the collective that this rank has started where another one stands; see `Party`."""
        here = self._position
        if here.agreements > position.agreements:
            raise LookupError("they have agreed")
        if here.agreements < position.agreements:
            return None
        if here.issued <= position.issued:
            return Answer(here.issued) if self._is_asking else None
        for agreements, issued, is_gather, unit_id in list(self._recent):
            unit = self._units.get(unit_id)
            if Position(agreements, issued) == position and unit is not None:
                line = line_of(users_frame(sys._current_frames().get(self._thread)))
                collective = planned(Gather if is_gather else Reduce, unit, line)
                return Answer(here.issued, (collective.what, collective.parameters, collective.line))
        return None

    def hear(self, failure: Failure) -> None:
        """Take note of what went wrong; the next collective, or the end of the one under way, raises it."""
        self._failure = self._failure or failure


def _is_detailed() -> bool:
    return dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


_guards: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Guard]] = weakref.WeakKeyDictionary()
"""By group and ranks: by the group of a mesh of one axis, else by the default one."""


def guards_of(units: Iterable[Unit]) -> dict[int, Guard]:
    """Returns the guards of `units`, by their ids, of those that are to have one."""
    guards = {}
    for unit in units:
        guard = _guard_of(unit.mesh)
        if guard is not None:
            guard.watch(unit)
            guards[unit.id] = guard
    return guards


def _guard_of(mesh: DataMesh) -> Guard | None:
    ranks = tuple(mesh.mesh.mesh.flatten().tolist())
    sends = not (mesh.comm.fake_all_gather or mesh.comm.fake_reduce)
    if len(ranks) == 1 or mesh.comm.divergence == "trust" or not sends:
        return None
    world = default_group()
    board = board_of(world)
    if board is None or dist.get_backend(world) == "fake":
        return None  # a rank that alone takes another way could not say so
    parent = group_of(mesh.mesh, 0) if mesh.mesh.ndim == 1 else world
    by_ranks = _guards.setdefault(parent, {})
    if ranks not in by_ranks:
        by_ranks[ranks] = Guard(parent, ranks, mesh.device, board)
    return by_ranks[ranks]


def guarded(do: Table, guards: dict[int, Guard]) -> Table:
    """Returns `do`, the table by which a runtime carries out its actions, with the units' `guards` looking on."""
    if not guards:
        return do

    def starting(action: type[Action]) -> Carry:
        def run(unit: Unit) -> None:
            guard = guards.get(unit.id)
            if guard is None or not unit.parameters or (action is Gather and unit.mesh.num_shards == 1):
                do[action](unit)
            else:
                guard.starts(action, unit, do)

        return run

    def waiting(action: type[Action]) -> Carry:
        def run(unit: Unit) -> None:
            guard = guards.get(unit.id)
            if guard is None:
                do[action](unit)
            else:
                guard.waits(action, unit, do)

        return run

    starts: Sequence[type[Action]] = (Gather, Reduce)
    waits: Sequence[type[Action]] = (Await, FinishReduce)
    return {**do, **{each: starting(each) for each in starts}, **{each: waiting(each) for each in waits}}
