"""The agreed order: the collectives that all ranks issue, also those that want others.

Ranks that want different collectives still issue the same ones, in one order. A rank goes along with what it did not
want, and gives nothing to it. What comes next is known from the last time, so most of the way nobody asks. Ranks vote
where a stretch of collectives ends: when a forward begins, a backward ends, an optimizer is about to step, a rank has
no batch left. There each says what it wants next, and all choose the same.

    rank 0 wants            begin  gather a  gather b            reduce b            reduce a  end
    rank 1 wants            begin  gather a            gather c            reduce c  reduce a  end
    both issue, first       begin  gather a  gather b  gather c  reduce c  reduce b  reduce a  end    a vote for each
    both issue, from then   begin  gather a  gather b  gather c  reduce c  reduce b  reduce a  end    votes at the ends

If a rank wants a collective that the known stretch lacks, it goes along to the stretch's end, and the vote there shows
it: the stretch goes on until nobody wants more. The next time it is voted on from its start, so that the new
collective finds its place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """The kind of a step. Those from `FAIL` on are voted on each time."""

    GATHER = 0
    REDUCE = 1
    FAIL = 2
    """A rank cannot finish its step: all give it up, wherever they are in it."""
    BEGIN = 3
    """A forward begins."""
    END = 4
    """A backward has ended, and its reductions."""
    STEP = 5
    """An optimizer is about to step."""
    DONE = 6
    """A rank has finished its step; the first part of it if its `detail` is 1."""
    BATCH = 7
    """A rank asks whether any has a batch left. Its `detail` is 0 if it has one itself."""
    LEAVE = 8
    """A rank wants nothing more until all others want nothing more."""


class Step(NamedTuple):
    """One step of the agreed order. `which` is the number of a unit or of an optimizer, the same on all ranks; `detail`
    tells steps of one kind apart that are different collectives."""

    kind: Kind
    which: int = 0
    detail: int = 0

    def is_served_by(self, taken: Step) -> bool:
        """Whether a rank that wants this step has what it wants when all take that one."""
        return taken == self or taken.kind is self.kind is Kind.BATCH

    @property
    def is_vote(self) -> bool:
        """Whether ranks vote each time on what follows where this step may be."""
        return self.kind >= Kind.FAIL


class Wish(NamedTuple):
    """The step that a rank wants to take next. It may stand in a backward, and in an attempt, which all ranks finish or
    give up."""

    step: Step
    in_backward: bool = False
    in_attempt: bool = False


CONTEXT = 4
"""A stretch is known by so many votes before it: micro-batches of one step may gather different units."""
MOST_STRETCHES = 1_000
"""Forget all stretches beyond this many: a program that never repeats itself must not fill the memory."""
LONGEST = 2
"""A stretch that was learnt anew keeps what it had before, up to so many times the length of what was wanted now."""


def choose(wishes: Sequence[Wish]) -> Step:
    """Returns the step that all ranks take, of those that they want.

    What comes earlier in a step goes first, so that a rank which is behind comes up to the others: in forward the units
    in their order, then backward in the opposite order, then what ends it. A rank that fails waits for those that have
    not begun yet what it gives up.
    """
    if any(wish.step.kind is Kind.FAIL for wish in wishes):
        late = [wish for wish in wishes if not wish.in_attempt and wish.step.kind is not Kind.LEAVE]
        wishes = late or wishes

    def place(wish: Wish) -> tuple[int, ...]:
        kind, which, detail = wish.step
        if kind is Kind.FAIL:
            return (0,)
        if not wish.in_backward and kind is Kind.GATHER:
            return 1, which, detail
        if kind is Kind.REDUCE:
            return 2, -which, detail
        if kind is Kind.GATHER:
            return 3, -which, detail
        return 4, kind, which, detail

    return min(wishes, key=place).step


class AgreedOrder:
    """The agreed order as one rank knows it. It is the same on all ranks, whatever each of them wants."""

    def __init__(self) -> None:
        self._known: dict[tuple[Step, ...], tuple[Step, ...]] = {}
        self._in_question: set[tuple[Step, ...]] = set()
        """Stretches that lacked something the last time."""
        self._votes: tuple[Step, ...] = ()
        """The last votes, which tell stretches apart."""
        self._taken: list[Step] = []
        """The steps of the present stretch."""
        self._expected: tuple[Step, ...] = ()
        """The steps of the present stretch the last time."""

    def expected(self) -> Step | None:
        """Returns the step that all ranks take next; None where they vote."""
        at = len(self._taken)
        return self._expected[at] if at < len(self._expected) else None

    def take(self, step: Step) -> None:
        """Note that all ranks take `step`."""
        if step.kind is Kind.FAIL:
            self._give_up()
        elif step.is_vote:
            self._end_stretch()
            is_first = step.kind in (Kind.STEP, Kind.DONE)
            self._votes = (step,) if is_first else (*self._votes, step)[-CONTEXT:]
            self._begin_stretch()
        else:
            self._taken.append(step)

    def _give_up(self) -> None:
        """Go on as after a step that is done, and learn nothing of this one."""
        self._votes = (Step(Kind.DONE),)
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._taken = []
        is_known = self._votes not in self._in_question
        self._expected = self._known.get(self._votes, ()) if is_known else ()

    def _end_stretch(self) -> None:
        if self._expected and len(self._taken) > len(self._expected):
            self._in_question.add(self._votes)
            return
        if len(self._known) >= MOST_STRETCHES:
            self._known.clear()
            self._in_question.clear()
        if self._taken and not self._expected:
            self._known[self._votes] = _merged(self._known.get(self._votes, ()), self._taken)
            self._in_question.discard(self._votes)


def _merged(before: Sequence[Step], now: Sequence[Step]) -> tuple[Step, ...]:
    """Returns `now` with the steps of `before` that it lacks, each behind the one that it followed, unless that becomes
    too long: what some rank wants now and then stays in its place."""
    merged: list[Step] = []
    for change, start, stop, first, last in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        merged += [] if change == "equal" else before[start:stop]
        merged += now[first:last]
    return tuple(merged if len(merged) <= LONGEST * len(now) else now)
