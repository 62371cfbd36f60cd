"""The checker: no rank starts a collective that the others do not start.

All ranks of a mesh must gather and reduce the same units in the same order. Otherwise they read each other's bytes as
their own, or wait until a timeout. The first time that a step takes a path, ranks compare before each collective. From
then on a rank compares only where it leaves the path of the last time (`Path`), so a steady-state step costs nothing.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NoReturn

import torch
import torch.distributed as dist

from sherd._torch import has_ended, users_call, users_line
from sherd.comm.failures import named
from sherd.comm.groups import is_debugging_in_detail
from sherd.comm.streams import is_capturing
from sherd.engine import Runtime, Unit, watcher
from sherd.errors import CommError
from sherd.guard.board import LOOK_EVERY_S, Answer, Board, Divergence, Progress, Query
from sherd.guard.deeds import Deed, Deeds
from sherd.guard.flight import NO_UNIT, CollectiveLog
from sherd.guard.order_check import (
    MOST_STEPS,
    Copied,
    PlannedCollective,
    Tree,
    agree,
    copied_by,
    different,
    digest_of,
    planned,
    tree_beside,
)
from sherd.schedule.actions import Action, Gather, GatherMore, Reduce
from sherd.schedule.path import Path
from sherd.schedule.state import Live

OVERTIME_S = 1.0
"""A comparison that has not ended so long after the timeout never ends.

Gloo should raise at the timeout. But while it connects to a rank that has given up listening, it tries five times, each
time as long as the timeout.
"""


MOST_DONE = 8
"""What a rank did is kept for so many collectives: an accelerator's host may be ahead of another rank's question."""
LOADED = Deed(lambda: ("shards were loaded since the last collective",))


class DivergenceChecker:
    """The checker of one mesh's ranks, as one rank sees it; for all units on that mesh, of any model."""

    def __init__(self, parent: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, board: Board) -> None:
        self.key = f"{parent.group_name} {ranks}"
        self._parent, self._ranks, self._device = weakref.ref(parent), ranks, device
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._path: Path[tuple[type[Action] | str, int, int, int, int]] = Path()
        self._position = Progress()
        self._steps: dict[int, tuple[int, int, int]] = {}
        """By unit: its optimizer steps at its last gather, its gathers since the last step, and those before it."""
        self._log = CollectiveLog(self.key, ranks, board.recorder)
        self._deeds = Deeds(self._log.units)
        watcher.listen(self._deeds)
        self._done: dict[int, tuple[Deed, ...]] = {}
        """What this rank did before its last collectives, by their numbers."""
        self._is_asking, self._cannot_be_left, self._agreed_at = False, False, 0
        self._divergence: Divergence | None = None
        self._board = board
        board.join(self)

    def watch(self, unit: Unit) -> None:
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
            num_trained = unit.backward.expected.num_trained
            for gradients in unit.backward.unflagged:
                form = 2 * form + (gradients.has_any or unit.policy.reduce_unused)
        # The host would wait for the values. They are compared at the first collective after the capture.
        compares = compared.replicas_may_differ and not is_capturing(self._device)
        new_steps, doubts = 0, compares
        if unit.is_on_all_ranks and (action is Gather or not unit.gathers):
            steps, since, usual = self._steps.get(unit.id, (0, 0, 0))
            new_steps = compared.num_steps - steps
            # Also compare where a step comes after another number of gathers than the last step, or does not come.
            doubts = doubts or (since != usual if new_steps else since == usual)
            self._steps[unit.id] = (compared.num_steps, 1, since) if new_steps else (steps, since + 1, usual)
        if compared.are_loaded and compared.take_load():
            # One load concerns all units, of which the first compares.
            doubts = doubts or self._done.get(self._log.newest, ())[-1:] != (LOADED,)
            self._deeds.pending.append(LOADED)
        if self._deeds.pending:
            self._done[self._log.newest + 1], is_new = self._deeds.take(self._model_of(unit))
            doubts |= is_new
            if len(self._done) > MOST_DONE:
                del self._done[next(iter(self._done))]
        self._path.take((action, unit.id, form, compared.digest or digest_of(unit), num_trained), doubts)
        variant = MOST_STEPS * form + min(new_steps, MOST_STEPS - 1)
        if not self._path.is_sure or is_debugging_in_detail():
            number = self._log.newest + 1
            copies = copied_by(unit) if compares else []
            self._compare(self._planned(action, unit, variant, number, users_line(sys._getframe())), copies)
            if compares:
                compared.agreed()
        before = self._position
        self._position = Progress(before.agreements, before.issued + 1)
        self._log.start(action, unit, variant, carry_out)
        if self._divergence is not None:
            self._raise_divergence(self._divergence)

    @staticmethod
    def _model_of(unit: Unit) -> set[int]:
        runtime: Runtime | None = unit.sealed_into()  # not `Runtime.over`: many collectives ask
        return {unit.id} if runtime is None else {each.id for each in runtime.units}

    def _planned(self, action: type[Action], unit: Unit, variant: int, number: int, line: str) -> PlannedCollective:
        """Returns the collective of a `number` in words, with what this rank did before it."""
        return planned(action, unit, variant, line).after(self._done.get(number, ()))

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks.

        Raises:
            CommError: a rank has declared meanwhile that ranks diverged; or a rank has died.
        """
        if action is GatherMore:
            self._log.go_on(action, unit, carry_out)
            return  # the other ranks wait for all of it: the next collective raises
        self._log.run(action, unit, carry_out)
        if self._divergence is not None:
            self._raise_divergence(self._divergence)

    @contextmanager
    def calls(self, what: str, purpose: str, is_rare: bool) -> Iterator[None]:
        """A context for a collective of all ranks outside of units; see `sherd.comm.failures.announced`."""
        if self._is_asking or self._log.is_entered:  # a part of what was announced already
            yield
            return
        if self._divergence is not None:
            self._raise_divergence(self._divergence)
        if is_rare:
            self._path.doubt()
        else:
            self._path.take((what, NO_UNIT, 0, 0, 0))
        name = f"{users_call(sys._getframe())}{f' ({purpose})' if purpose else ''}"
        call = PlannedCollective(what, (), line=users_line(sys._getframe()), call=name)
        if not self._path.is_sure:
            self._compare(call)
        self._cannot_be_left = not is_rare
        self._position = Progress(self._position.agreements, self._position.issued + 1)
        try:
            with self._log.calling(call):
                yield
        finally:
            self._cannot_be_left = False
        if self._divergence is not None:
            self._raise_divergence(self._divergence)

    def agrees(self, what: str, terms: Sequence[str], units: Sequence[Unit]) -> None:
        """Return when all ranks make a call with these `terms`, and replicas hold the same values of `units`.

        Raises:
            CommError: they do not, or a rank has died.
        """
        if self._divergence is not None:
            self._raise_divergence(self._divergence)
        copies = [each for unit in units for each in copied_by(unit)]
        frame = sys._getframe()
        call = PlannedCollective(what, (), tuple(terms), users_line(frame), call=users_call(frame))
        self._compare(call, copies)

    def _raise_divergence(self, divergence: Divergence) -> NoReturn:
        # The record comes first: the collectives of `_release` are not the program's.
        error = self._log.failure(divergence.text)
        with contextlib.suppress(CommError):
            self._release(divergence.issued - self._position.issued)
        raise error

    # The comparison

    def _compare(self, collective: PlannedCollective, copies: Sequence[Copied] = ()) -> None:
        """Return once all ranks are about to start `collective`. Raises CommError if they are not.

        `copies` are hashes of values that other ranks hold, too.
        """
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
                tree = self._tree()
                latest = time.monotonic() + tree.timeout_s + OVERTIME_S
                text = agree(tree, collective, self._position.issued, wait, copies)
                if text:
                    raise self._log.failure(text)
        except CommError:
            self._path = Path()  # ranks reached it by different steps, so no known place holds any more
            raise
        finally:
            self._is_asking = False
            self._agreed_at, self._position = self._log.newest, Progress(self._position.agreements + 1)
        self._path.agree()

    def _tree(self) -> Tree:
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
        """Take part in the next `number` collectives, which others have started, so that they do not wait forever."""
        number = max(number, 0)
        self._position = Progress(self._position.agreements, self._position.issued + number)
        for action, unit_id, form, *_ in islice(self._path.expected(), number):
            unit = self._log.units.get(unit_id)
            if unit is None:  # of a deleted model, or a collective outside of units, whose ranks `hear` ends
                return
            if action is Reduce:
                unit.discard()
                unit.backward.lack_nothing(form)
                unit.reduce()
                unit.discard()
            else:
                if unit.live is Live.GATHERING:
                    unit.gather_more(0)
                    unit.wait()
                unit.free()
                unit.gather()
                unit.wait()
                unit.free()

    # What the board asks

    @property
    def blocked_s(self) -> float:
        """How long host or device have waited for other ranks, in seconds; infinity while this rank compares."""
        return math.inf if self._is_asking else self._log.waits_s

    def answer(self, position: Progress) -> Answer | None:
        """Returns the collective that this rank has started where another rank stands; see `Participant`."""
        own = self._position
        if own.agreements > position.agreements:
            raise LookupError("they have agreed")
        if own.agreements < position.agreements:
            return None
        if own.issued <= position.issued:
            return Answer(own.issued) if self._is_asking else None
        asked_at = self._agreed_at + position.issued + 1
        for number, _, _, is_gather, unit_id, variant in list(self._log.started):
            unit = self._log.units.get(unit_id)
            if number == asked_at and unit_id == NO_UNIT:
                return Answer(own.issued, dict(self._log.calls)[number])
            if number == asked_at and unit is not None:
                line = users_line(sys._current_frames().get(self._log.thread))
                action = Gather if is_gather else Reduce
                return Answer(own.issued, self._planned(action, unit, variant, number, line))
        return None

    def hear(self, divergence: Divergence) -> None:
        """Note a declared divergence, which the collective under way raises at its end, or the next one."""
        self._divergence = self._divergence or divergence
        if self._cannot_be_left:
            self._board.watchdog.end(divergence.text)
