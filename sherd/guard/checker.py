"""The checker: no rank starts a collective that the others do not start.

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
import math
import sys
import time
import weakref
from collections.abc import Callable
from itertools import islice
from typing import NoReturn

import torch
import torch.distributed as dist

from sherd._torch import has_ended, users_line
from sherd.comm.failures import named
from sherd.engine import Unit
from sherd.errors import CommError
from sherd.guard.board import LOOK_EVERY_S, Answer, Board, Failure, Inquiry, Position
from sherd.guard.ledger import Ledger
from sherd.guard.likeness import HASH_BYTES, digest_of, values_hash
from sherd.guard.order_check import MOST_STEPS, PlannedCollective, agree, different, planned
from sherd.guard.tree import Tree, tree_beside
from sherd.schedule.actions import Action, Gather, Reduce
from sherd.schedule.path import Path
from sherd.schedule.state import Live

OVERTIME_S = 1.0
"""A comparison that has not ended so long after the timeout never will. Gloo is to say so, but while it connects to a
rank that has listened and given up, it tries five times, each as long as the timeout."""


class DivergenceChecker:
    """The checker of one mesh's ranks, as one rank sees it; for all units on that mesh, of any model."""

    def __init__(self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, board: Board) -> None:
        self.key = f"{parent.group_name} {ranks}"
        self._parent, self._ranks, self._device = weakref.ref(parent), ranks, device
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._path: Path[tuple[type[Action], int, int, int, int]] = Path()
        self._position = Position()
        self._steps: dict[int, tuple[int, int, int]] = {}
        """By unit: its optimizer steps at its last gather, its gathers since the last step, and those before it."""
        self._ledger = Ledger(self.key, ranks, board.recorder)
        self._is_asking, self._agreed_at = False, 0
        self._failure: Failure | None = None
        self._board = board
        board.join(self)

    def watch(self, unit: Unit) -> None:
        """Know `unit`, one of the mesh's."""
        self._ledger.units[unit.id] = unit

    def begin(self, unit: Unit) -> None:
        """A pass begins: the forward of `unit`, a root."""
        self._path.begin()

    def end_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has ended."""

    def abandon_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has raised in its middle: the next collective shows it."""

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, as all ranks do.

        Raises:
            CommError: not all ranks do, or one has died.
        """
        if self._failure is not None:
            self._raise_failure(self._failure)
        compared, kind, num_trained = unit.compared, 0, 0
        if action is Gather:
            kind = int(unit.in_full_precision)
        else:
            num_trained = unit.backward.num_trained
            for arrivals in unit.backward.unflagged:
                kind = 2 * kind + (arrivals.has_any or unit.policy.reduce_unused)
        new, doubts = 0, compared.replicas_may_differ
        if unit.is_on_all_ranks and (action is Gather or unit.mesh.num_shards == 1):
            steps, since, usual = self._steps.get(unit.id, (0, 0, 0))
            new = compared.num_steps - steps
            # It also asks where a step comes after another number of gathers than the last one, or does not come.
            doubts = doubts or (since != usual if new else since == usual)
            self._steps[unit.id] = (compared.num_steps, 1, since) if new else (steps, since + 1, usual)
        self._path.take((action, unit.id, kind, compared.digest or digest_of(unit), num_trained), doubts)
        which = MOST_STEPS * kind + min(new, MOST_STEPS - 1)
        if not self._path.is_sure or _is_detailed():
            self._ask(planned(action, unit, which, users_line(sys._getframe())), unit)
            compared.agreed()
        here = self._position
        self._position = Position(here.agreements, here.issued + 1)
        self._ledger.start(action, unit, which, carry_out)
        if self._failure is not None:
            self._raise_failure(self._failure)

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks.

        Raises:
            CommError: while it waited, it was declared that ranks went different ways; or one has died.
        """
        self._ledger.run(action, unit, carry_out)
        if self._failure is not None:
            self._raise_failure(self._failure)

    def _raise_failure(self, failure: Failure) -> NoReturn:
        error = self._ledger.failure(failure.text)  # recorded before the farewell, which no program has asked for
        with contextlib.suppress(CommError):
            self._release(failure.issued - self._position.issued)
        raise error

    # The comparison

    def _ask(self, collective: PlannedCollective, unit: Unit) -> None:
        self._is_asking = True
        has_asked, inquiry = False, None

        def wait(work: dist.Work) -> None:
            nonlocal has_asked, inquiry
            while not has_ended(work, LOOK_EVERY_S if has_asked else self._board.patience_s):
                if self._failure is not None:
                    self._raise_failure(self._failure)
                if time.monotonic() > latest:
                    raise RuntimeError(f"it has not ended {OVERTIME_S:g} s after the timeout")
                try:
                    if not has_asked:
                        inquiry, has_asked = self._board.inquire(self.key, self._position), True
                    if inquiry is not None:
                        self._give_up_if_alone(inquiry, collective)
                except RuntimeError as error:  # of a store that is busy, or gone with a rank, which ends `work`
                    if isinstance(error, CommError):
                        raise

        try:
            with self._ledger.waiting(collective):
                may_differ = unit.compared.replicas_may_differ
                values = values_hash(unit) if may_differ else bytes(HASH_BYTES)
                copies = unit.mesh.copies_of_shards() if may_differ else []
                tree = self._tree()
                latest = time.monotonic() + tree.timeout_s + OVERTIME_S
                text = agree(tree, collective, self._position.issued, wait, values, copies)
                if text:
                    raise self._ledger.failure(text)
        except CommError:
            self._path = Path()  # ranks have taken different steps to here
            raise
        finally:
            self._is_asking = False
            self._agreed_at, self._position = self._ledger.newest, Position(self._position.agreements + 1)
        self._path.agree()

    def _tree(self) -> Tree:
        """Returns the tree that ranks compare over. It is used for nothing else, so that a comparison meets only other
        comparisons, and its groups are the host's, which is what waits."""
        parent = self._parent()
        assert parent is not None, "the mesh of a unit holds it"
        # One that was made at DETAIL keeps the host waiting from the call on, when the level is no longer that.
        purpose = "order-detail" if _is_detailed() else "order"
        with named("the first comparison of what ranks are about to do", parent):
            return tree_beside(parent, purpose, self._ranks, self._device)

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

    def _release(self, number: int) -> None:
        """Take part in the next `number` collectives, which others have started, so that they do not wait for ever."""
        number = max(number, 0)
        self._position = Position(self._position.agreements, self._position.issued + number)
        for action, unit_id, which, *_ in islice(self._path.expected(), number):
            unit = self._ledger.units.get(unit_id)
            if unit is None:
                return
            if action is Reduce:
                unit.discard()
                unit.backward.lack_nothing(which)
                unit.reduce()
                unit.discard()
            else:
                if unit.live is Live.GATHERING:
                    unit.wait()
                unit.free()
                unit.gather()
                unit.wait()
                unit.free()

    # What the board asks

    @property
    def blocked_s(self) -> float:
        """For how long host or device have waited for other ranks; for ever while this one compares."""
        return math.inf if self._is_asking else self._ledger.waits_s

    def answer(self, position: Position) -> Answer | None:
        """Returns the collective that this rank has started where another one stands; see `Party`."""
        here = self._position
        if here.agreements > position.agreements:
            raise LookupError("they have agreed")
        if here.agreements < position.agreements:
            return None
        if here.issued <= position.issued:
            return Answer(here.issued) if self._is_asking else None
        there = self._agreed_at + position.issued + 1
        for number, _, _, is_gather, unit_id, which in list(self._ledger.started):
            unit = self._ledger.units.get(unit_id)
            if number == there and unit is not None:
                line = users_line(sys._current_frames().get(self._ledger.thread))
                collective = planned(Gather if is_gather else Reduce, unit, which, line)
                told = (collective.what, collective.parameters, collective.terms, collective.line)
                return Answer(here.issued, told)
        return None

    def hear(self, failure: Failure) -> None:
        """Take note of what went wrong; the next collective, or the end of the one under way, raises it."""
        self._failure = self._failure or failure


def _is_detailed() -> bool:
    return dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
