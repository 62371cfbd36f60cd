"""The sequence of collectives of a mesh's ranks, as far as the ranks have agreed on it.

All ranks of a mesh take the same steps in the same order. At each place the path knows the step that followed last
time, on which all ranks agreed. A rank that takes the known step need not ask. A rank that takes another step must ask
before its next collective. If all ranks changed alike, all of them ask, and go on. If not, the others took the known
step, and `expected` says which it was.

    a step of three blocks          begin  gather a  gather b  gather c  gather b  reduce c  gather a  reduce b ...
    a pass of evaluation after it   begin  gather a  gather b  gather c  begin
                                                                         asked for, and known from then on

A place is known by the steps since the pass began and by the entire pass before, so that gradients summed over several
passes, or an evaluation every so often, are known after their first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

Step = TypeVar("Step")


class _Pass(Enum):
    BEGIN = "begin"


MOST_PLACES = 20_000
"""All places are forgotten beyond this many: a model that never repeats itself must not fill the memory. All ranks know
the same places, so all forget at once."""


class _Place(Generic[Step]):
    __slots__ = ("followers", "last")

    def __init__(self) -> None:
        self.last: Step | _Pass | None = None
        self.followers: dict[Step | _Pass, _Place[Step]] = {}


class Path(Generic[Step]):
    """The place where one rank stands, and the places known so far. Steps are hashable.

    Attributes:
        is_sure: all steps since the last agreement were the known ones.
    """

    def __init__(self) -> None:
        self.is_sure = True
        self._firsts: dict[int, _Place[Step]] = {}
        """By the pass before: the first place of the next pass."""
        self._num_places = 0
        self._pass = 0
        self._place = self._first_after(0)
        self._left_at: tuple[_Place[Step], Step | _Pass | None, int] | None = None
        """The place where this rank took another step than the known one, the known step, and the pass up to it."""

    def begin(self) -> None:
        """Begin a pass: the forward of a root module."""
        self.take(_Pass.BEGIN)

    def take(self, step: Step | _Pass, doubts: bool = False) -> None:
        place = self._place
        if doubts or place.last != step:
            if self.is_sure:
                self.is_sure = False
                self._left_at = place, place.last, self._pass
            place.last = step
        if isinstance(step, _Pass):
            self._place, self._pass = self._first_after(self._pass), 0
            return
        follower = place.followers.get(step)
        if follower is None:
            follower = place.followers[step] = _Place[Step]()
            self._num_places += 1
        self._place, self._pass = follower, hash((self._pass, step))

    def doubt(self) -> None:
        """Note that this rank is about to do something that is no step: all ranks are to say whether they do it."""
        if self.is_sure:
            self.is_sure, self._left_at = False, (self._place, self._place.last, self._pass)

    def agree(self) -> None:
        self.is_sure, self._left_at = True, None
        if self._num_places > MOST_PLACES:
            self._firsts.clear()
            self._num_places, self._pass = 0, 0
            self._place = self._first_after(0)

    def expected(self) -> Iterator[Step]:
        """Yields the known next steps: from the place where this rank left the known path, else from this place."""
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

    def _first_after(self, of_pass: int) -> _Place[Step]:
        first = self._firsts.get(of_pass)
        if first is None:
            first = self._firsts[of_pass] = _Place[Step]()
            self._num_places += 1
        return first
