"""The path of a mesh's ranks through their collectives, as far as they have agreed on it.

All ranks of a mesh take the same steps in the same order. At each place the path knows the step that followed last, on
which all ranks have agreed. A rank that takes that one again need not ask. One that takes another is not sure, and must
ask before its next collective. If all ranks have changed alike, all of them ask, and go on. If not, the others have
taken the known step, and `expected` says what it was.

    a step of three blocks          begin  gather a  gather b  gather c  gather b  reduce c  gather a  reduce b ...
    a pass of evaluation after it   begin  gather a  gather b  gather c  begin
                                                                         asked for, and known from then on

Places are told apart by the steps since the pass began and by the whole pass before, so that gradients summed over
several passes, or an evaluation every so often, are known after their first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

Step = TypeVar("Step")


class _Pass(Enum):
    BEGIN = "begin"


MOST_PLACES = 20_000
"""Forget all places beyond this many: a model that never repeats itself must not fill the memory. All ranks know the
same places, so all forget at once."""


class _Place(Generic[Step]):
    __slots__ = ("followers", "last")

    def __init__(self) -> None:
        self.last: Step | _Pass | None = None
        self.followers: dict[Step | _Pass, _Place[Step]] = {}


class Path(Generic[Step]):
    """The place where one rank stands, and the way there. Steps are hashable.

    Attributes:
        is_sure: all steps since the last agreement were those that followed last time.
    """

    def __init__(self) -> None:
        self.is_sure = True
        self._firsts: dict[int, _Place[Step]] = {}
        """The first place of a pass, by the pass before it."""
        self._num_places = 0
        self._pass = 0
        self._place = self._first_after(0)
        self._left_at: tuple[_Place[Step], Step | _Pass | None, int] | None = None
        """The place where this rank took another step than the known one, that known one, and the pass until there."""

    def begin(self) -> None:
        """Begin a pass: the forward of a root module."""
        self._take(_Pass.BEGIN)

    def take(self, step: Step, doubts: bool = False) -> None:
        """Take `step`. With `doubts` the rank is not sure of it, even if it is the known one."""
        self._take(step, doubts)

    def _take(self, step: Step | _Pass, doubts: bool = False) -> None:
        place = self._place
        if doubts or place.last != step:
            if self.is_sure:
                self.is_sure = False
                self._left_at = place, place.last, self._pass
            place.last = step
        self._place, self._pass = self._behind(place, step, self._pass)

    def agree(self) -> None:
        """Note that all ranks stand here."""
        self.is_sure, self._left_at = True, None
        if self._num_places > MOST_PLACES:
            self._firsts.clear()
            self._num_places, self._pass = 0, 0
            self._place = self._first_after(0)

    def expected(self) -> Iterator[Step]:
        """Yields the steps, as far as they are known, with which the path goes on: from where this rank has left it, if
        it has."""
        place, step, of_pass = self._left_at or (self._place, self._place.last, self._pass)
        while step is not None:
            if not isinstance(step, _Pass):
                yield step
            follower = place.followers.get(step)
            if isinstance(step, _Pass):
                follower, of_pass = self._firsts.get(of_pass), 0
            else:
                of_pass = hash((of_pass, step))
            if follower is None:
                return
            place, step = follower, follower.last

    def _behind(self, place: _Place[Step], step: Step | _Pass, of_pass: int) -> tuple[_Place[Step], int]:
        """Returns the place after `step`, and the pass until there."""
        if isinstance(step, _Pass):
            return self._first_after(of_pass), 0
        follower = place.followers.get(step)
        if follower is None:
            follower = place.followers[step] = _Place[Step]()
            self._num_places += 1
        return follower, hash((of_pass, step))

    def _first_after(self, of_pass: int) -> _Place[Step]:
        first = self._firsts.get(of_pass)
        if first is None:
            first = self._firsts[of_pass] = _Place[Step]()
            self._num_places += 1
        return first
