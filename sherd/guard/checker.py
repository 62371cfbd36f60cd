"""The checker: no rank starts a collective that the others do not start.

All ranks of a mesh must gather and reduce the same units in the same order. Otherwise they read each other's bytes as
their own, or wait until a timeout. The first time that a step takes a path, ranks compare before each collective. From
then on a rank compares only where it leaves the path of the last time (`Path`), so a settled step costs nothing.

If all ranks have changed alike, the comparison says so. If not, the others are blocked in the next collective of the
path, and say so on the board (`Board`). The rank that left the path then declares what it wanted and where the others
are. It takes part in the collectives that they have started, with the values that it has, so that they come out of
them; and all ranks raise the same error.

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
from sherd.comm.groups import is_debugging_in_detail
from sherd.engine import Unit
from sherd.errors import CommError
from sherd.guard.board import LOOK_EVERY_S, Answer, Board, Divergence, Progress, Query
from sherd.guard.flight import CollectiveLog
from sherd.guard.order_check import (
    MOST_STEPS,
    PlannedCollective,
    Tree,
    agree,
    copied_by,
    different,
    digest_of,
    planned,
    tree_beside,
)
from sherd.schedule.actions import Action, Gather, Reduce
from sherd.schedule.path import Path
from sherd.schedule.state import Live

OVERTIME_S = 1.0
"""A comparison that has not ended so long after the timeout never ends.

Gloo should raise at the timeout. But while it connects to a rank that has given up listening, it tries five times, each
time as long as the timeout.
"""


class DivergenceChecker:
    """The checker of one mesh's ranks, as one rank sees it; for all units on that mesh, of any model."""

    def __init__(self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, board: Board) -> None:
        self.key = f"{parent.group_name} {ranks}"
        self._parent, self._ranks, self._device = weakref.ref(parent), ranks, device
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._path: Path[tuple[type[Action], int, int, int, int]] = Path()
        self._position = Progress()
        self._steps: dict[int, tuple[int, int, int]] = {}
        """By unit: its optimizer steps at its last gather, its gathers since the last step, and those before it."""
        self._log = CollectiveLog(self.key, ranks, board.recorder)
        self._is_asking, self._agreed_at = False, 0
        self._divergence: Divergence | None = None
        self._board = board
        board.join(self)

    def watch(self, unit: Unit) -> None:
        """Know `unit`, one of the mesh's."""
        self._log.units[unit.id] = unit

    def begin(self, unit: Unit) -> None:
        """Begin a pass: the forward of `unit`, a root."""
        self._path.begin()

    def end_backward(self, unit: Unit) -> None:
        """Do nothing: the next collective shows whether ranks differ."""

    def abandon_backward(self, unit: Unit) -> None:
        """Do nothing: the next collective shows whether ranks differ."""

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, as all ranks do.

        Raises:
            CommError: not all ranks do, or one has died.
        """
        if self._divergence is not None:
            self._raise_divergence(self._divergence)
        compared, form, num_trained = unit.compared, 0, 0
        if action is Gather:
            form = int(unit.in_full_precision)
        else:
            num_trained = unit.backward.num_trained
            for arrivals in unit.backward.unflagged:
                form = 2 * form + (arrivals.has_any or unit.policy.reduce_unused)
        new_steps, doubts = 0, compared.replicas_may_differ
        if unit.is_on_all_ranks and (action is Gather or not unit.gathers):
            steps, since, usual = self._steps.get(unit.id, (0, 0, 0))
            new_steps = compared.num_steps - steps
            # Also compare where a step comes after another number of gathers than the last step, or does not come.
            doubts = doubts or (since != usual if new_steps else since == usual)
            self._steps[unit.id] = (compared.num_steps, 1, since) if new_steps else (steps, since + 1, usual)
        self._path.take((action, unit.id, form, compared.digest or digest_of(unit), num_trained), doubts)
        variant = MOST_STEPS * form + min(new_steps, MOST_STEPS - 1)
        if not self._path.is_sure or is_debugging_in_detail():
            self._compare(planned(action, unit, variant, users_line(sys._getframe())), unit)
            compared.agreed()
        here = self._position
        self._position = Progress(here.agreements, here.issued + 1)
        self._log.start(action, unit, variant, carry_out)
        if self._divergence is not None:
            self._raise_divergence(self._divergence)

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks.

        Raises:
            CommError: a rank has declared meanwhile that ranks diverged; or a rank has died.
        """
        self._log.run(action, unit, carry_out)
        if self._divergence is not None:
            self._raise_divergence(self._divergence)

    def _raise_divergence(self, divergence: Divergence) -> NoReturn:
        # The record comes first: the collectives of `_release` are not the program's.
        error = self._log.failure(divergence.text)
        with contextlib.suppress(CommError):
            self._release(divergence.issued - self._position.issued)
        raise error

    # The comparison

    def _compare(self, collective: PlannedCollective, unit: Unit) -> None:
        """Return once all ranks are about to start `collective`. Raises CommError if they are not."""
        self._is_asking = True
        has_asked, query = False, None

        def wait(work: dist.Work) -> None:
            nonlocal has_asked, query
            while not has_ended(work, LOOK_EVERY_S if has_asked else self._board.patience_s):
                if self._divergence is not None:
                    self._raise_divergence(self._divergence)
                if time.monotonic() > latest:
                    raise RuntimeError(f"it has not ended {OVERTIME_S:g} s after the timeout")
                try:
                    if not has_asked:
                        query, has_asked = self._board.ask(self.key, self._position), True
                    if query is not None:
                        self._declare_if_alone(query, collective)
                except RuntimeError as error:  # the store is busy, or gone with a rank, whose death ends `work`
                    if isinstance(error, CommError):
                        raise

        try:
            with self._log.waiting(collective):
                copies = copied_by(unit) if unit.compared.replicas_may_differ else []
                tree = self._tree()
                latest = time.monotonic() + tree.timeout_s + OVERTIME_S
                text = agree(tree, collective, self._position.issued, wait, copies)
                if text:
                    raise self._log.failure(text)
        except CommError:
            self._path = Path()  # ranks came here by different steps, so no known place holds any more
            raise
        finally:
            self._is_asking = False
            self._agreed_at, self._position = self._log.newest, Progress(self._position.agreements + 1)
        self._path.agree()

    def _tree(self) -> Tree:
        """Returns the tree that ranks compare over."""
        parent = self._parent()
        assert parent is not None, "the mesh of a unit holds it"
        # The tree has groups of its own, so that a comparison meets only other comparisons. A group made at DETAIL
        # keeps the host waiting inside each call, also once the level is another one; so there are two trees.
        purpose = "order-detail" if is_debugging_in_detail() else "order"
        with named("the first comparison of what ranks are about to do", parent):
            return tree_beside(parent, purpose, self._ranks, self._device)

    def _declare_if_alone(self, query: Query, collective: PlannedCollective) -> None:
        """Declare the divergence, if all other ranks have said where they are and some will not come."""
        answers = query.answers(self._peers)
        started = {rank: answer.collective for rank, answer in answers.items() if answer.collective}
        if not started or len(answers) < len(self._peers):
            return
        known = [rank for rank in self._ranks if rank in started or rank == dist.get_rank()]
        text = different(known, [started.get(rank, collective) for rank in known])
        self._divergence = Divergence(text, max(answer.issued for answer in answers.values()))
        query.declare(self._divergence, self._peers)

    def _release(self, number: int) -> None:
        """Take part in the next `number` collectives, which others have started, so that they do not wait for ever."""
        number = max(number, 0)
        self._position = Progress(self._position.agreements, self._position.issued + number)
        for action, unit_id, form, *_ in islice(self._path.expected(), number):
            unit = self._log.units.get(unit_id)
            if unit is None:
                return
            if action is Reduce:
                unit.discard()
                unit.backward.lack_nothing(form)
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
        """How long host or device have waited for other ranks; for ever while this rank compares."""
        return math.inf if self._is_asking else self._log.waits_s

    def answer(self, position: Progress) -> Answer | None:
        """Returns the collective that this rank has started where another rank stands; see `Participant`."""
        here = self._position
        if here.agreements > position.agreements:
            raise LookupError("they have agreed")
        if here.agreements < position.agreements:
            return None
        if here.issued <= position.issued:
            return Answer(here.issued) if self._is_asking else None
        there = self._agreed_at + position.issued + 1
        for number, _, _, is_gather, unit_id, variant in list(self._log.started):
            unit = self._log.units.get(unit_id)
            if number == there and unit is not None:
                line = users_line(sys._current_frames().get(self._log.thread))
                return Answer(here.issued, planned(Gather if is_gather else Reduce, unit, variant, line))
        return None

    def hear(self, divergence: Divergence) -> None:
        """Note a declared divergence, which the collective under way raises at its end, or the next one."""
        self._divergence = self._divergence or divergence
