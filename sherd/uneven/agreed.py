"""The agreed order: the one sequence of collectives that all ranks issue, although their models want different ones.

A rank takes part in a collective that it does not want, and contributes nothing. The next collective is known from the
last time, so most of the time no rank asks. Ranks vote where a stretch of collectives ends: when a forward begins, a
backward ends, an optimizer is about to step, or a rank has no batch left. In a vote each rank says which step it wants
next, and all choose the same one.

    rank 0 wants            begin  gather a  gather b            reduce b            reduce a  end
    rank 1 wants            begin  gather a            gather c            reduce c  reduce a  end
    both issue, first       begin  gather a  gather b  gather c  reduce c  reduce b  reduce a  end    a vote for each
    both issue, from then   begin  gather a  gather b  gather c  reduce c  reduce b  reduce a  end    votes at the ends

If a rank wants a collective that the known stretch lacks, it follows the stretch to the end, where it votes for the
collective: the stretch goes on until no rank wants more. The next time ranks vote from the start of the stretch, so
that the new collective gets its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from typing import NamedTuple


class StepKind(IntEnum):
    GATHER = 0
    REDUCE = 1
    FAIL = 2
    """A rank cannot finish its step: all ranks give up the step, wherever they are."""
    BEGIN = 3
    """A forward begins."""
    END = 4
    """A backward ends, with its reductions."""
    STEP = 5
    """An optimizer is about to step."""
    DONE = 6
    """A rank has finished its step, or with `detail` 1 the first part of it."""
    BATCH = 7
    """A rank asks if any rank has a batch left. `detail` is 0 if this rank has one."""
    LEAVE = 8
    """A rank wants no more steps until all others want no more."""


class AgreedStep(NamedTuple):
    """One step of the agreed order.

    Attributes:
        kind: the kind of the step.
        which: the number of a unit or of an optimizer, the same on all ranks.
        detail: tells different collectives of one kind apart.
    """

    kind: StepKind
    which: int = 0
    detail: int = 0

    def is_served_by(self, taken: AgreedStep) -> bool:
        """Returns whether a rank that wants this step is content when all ranks take the step `taken`."""
        return taken == self or taken.kind is self.kind is StepKind.BATCH

    @property
    def is_vote(self) -> bool:
        return self.kind >= StepKind.FAIL


class Proposal(NamedTuple):
    """A rank's vote: the step that it wants to take next, and where it is.

    Attributes:
        step: the step.
        in_backward: the rank is in a backward.
        in_attempt: the rank is in a step that all ranks finish or give up.
    """

    step: AgreedStep
    in_backward: bool = False
    in_attempt: bool = False


CONTEXT = 4
"""The number of votes by which the next stretch is known: micro-batches of one step may gather different units."""
MOST_STRETCHES = 1_000
"""All stretches are forgotten beyond this many: a program that never repeats itself must not fill the memory."""
LONGEST = 2
"""A stretch that is learnt again keeps its former steps, up to this many times the length of the new ones."""


def choose(wishes: Sequence[Proposal]) -> AgreedStep:
    """Returns the step that all ranks take, one of the `wishes`.

    The step that comes earliest in a training step goes first, so that a rank which is behind catches up: in forward
    the units in their order, then backward in the opposite order, then the end. A failing rank waits until all ranks
    have entered the step that it aborts.
    """
    if any(wish.step.kind is StepKind.FAIL for wish in wishes):
        late = [wish for wish in wishes if not wish.in_attempt and wish.step.kind is not StepKind.LEAVE]
        wishes = late or wishes

    def place(wish: Proposal) -> tuple[int, ...]:
        kind, which, detail = wish.step
        if kind is StepKind.FAIL:
            return (0,)
        if not wish.in_backward and kind is StepKind.GATHER:
            return 1, which, detail
        if kind is StepKind.REDUCE:
            return 2, -which, detail
        if kind is StepKind.GATHER:
            return 3, -which, detail
        return 4, kind, which, detail

    return min(wishes, key=place).step


class AgreedOrder:
    """The agreed order as one rank knows it. It is the same on all ranks, whatever each rank wants."""

    def __init__(self) -> None:
        self._known: dict[tuple[AgreedStep, ...], tuple[AgreedStep, ...]] = {}
        self._in_question: set[tuple[AgreedStep, ...]] = set()
        """The stretches that lacked a step the last time."""
        self._votes: tuple[AgreedStep, ...] = ()
        """The last votes, by which the present stretch is known."""
        self._taken: list[AgreedStep] = []
        """The steps of the present stretch."""
        self._expected: tuple[AgreedStep, ...] = ()
        """The steps of the present stretch the last time."""

    def expected(self) -> AgreedStep | None:
        """Returns the step that all ranks take next; None if they vote."""
        at = len(self._taken)
        return self._expected[at] if at < len(self._expected) else None

    def take(self, step: AgreedStep) -> None:
        """Note that all ranks take `step`."""
        if not step.is_vote:
            self._taken.append(step)
            return
        if step.kind is StepKind.FAIL:
            self._votes = (
                AgreedStep(StepKind.DONE),
            )  # as after a step that is done; an aborted stretch teaches nothing
        else:
            self._learn_stretch()
            is_first = step.kind in (StepKind.STEP, StepKind.DONE)
            self._votes = (step,) if is_first else (*self._votes, step)[-CONTEXT:]
        self._taken = []
        is_known = self._votes not in self._in_question
        self._expected = self._known.get(self._votes, ()) if is_known else ()

    def _learn_stretch(self) -> None:
        if self._expected and len(self._taken) > len(self._expected):
            self._in_question.add(self._votes)
            return
        if len(self._known) >= MOST_STRETCHES:
            self._known.clear()
            self._in_question.clear()
        if self._taken and not self._expected:
            self._known[self._votes] = _merged(self._known.get(self._votes, ()), self._taken)
            self._in_question.discard(self._votes)


def _merged(before: Sequence[AgreedStep], now: Sequence[AgreedStep]) -> tuple[AgreedStep, ...]:
    """Returns `now`, with each step of `before` that it lacks behind the step that was before it; `now` if too long.

    So a step that some rank wants now and then keeps its place.
    """
    merged: list[AgreedStep] = []
    for change, start, stop, first, last in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        merged += [] if change == "equal" else before[start:stop]
        merged += now[first:last]
    return tuple(merged if len(merged) <= LONGEST * len(now) else now)
