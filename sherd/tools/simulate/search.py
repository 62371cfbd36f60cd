"""Whether settings fit the memory, and the search for the fastest that do: there are too many to try them all.

The search begins with a few settings. One choice after the other gets the best of its values, given the other choices:
of settings that do not fit, the one that lacks least memory; of settings that fit, the fastest, where a tight step
counts as half as long again (coordinate descent). Along an axis of a mesh it stops where steps only get worse, and it
leaves out an axis that is much slower. When no single change helps, the differences in time and memory of all single
changes are known. As if these added up, the best combinations of changes are chosen and tried; a better one is the next
beginning.
"""

from __future__ import annotations

import gc
import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any, NamedTuple

from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.settings import Settings, Space

# Whether settings fit


class Verdict(str, Enum):
    """Whether a step fits. The value is its name in words."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits as planned, and would not if it took as much more as published trainings did."""
    NOT = "does not fit"


class Published(NamedTuple):
    """How far the memory of `num` published trainings on `devices` was from their plans.

    They took more than planned by shares from `low` to `high`, without the tenth at either end.
    """

    devices: str
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        if self.low < 0 < self.high:
            share = f"{-self.low:.0%} less to {self.high:.0%} more"
        else:
            least, most = sorted(map(abs, (self.low, self.high)))
            share = f"{100 * least:.0f} to {most:.0%} {'more' if self.high > 0 else 'less'}"
        return f"published {self.devices} trainings took {share} than planned"


PUBLISHED = (
    Published("A100", 0.062, 0.131, 4),
    Published("H100", -0.176, 0.095, 49),
    Published("A100, B200, H100 and MI300X", -0.188, 0.107, 57),
)
"""By kinds of devices with four trainings at least, and of all. tests/planning/test_published.py computes them from
docs/data/predictions.csv."""


def published_on(cluster: Cluster) -> Published | None:
    """Returns the published trainings on the kind of the cluster's device, or on all kinds; None for a CPU."""
    if not cluster.device.overlaps:
        return None
    return next((each for each in PUBLISHED if each.devices in cluster.device.name), PUBLISHED[-1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The seconds of a step under some settings, its bytes on a device, and those in the memory of its node."""

    seconds: float
    nbytes: int
    host_bytes: int = 0


TIGHT = 1.5
"""A tight step counts as so many times as long, so that settings with a margin are chosen up to this price."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of a device and of a node's memory (None: not known), and how far published trainings were off."""

    device: int
    host: int | None = None
    published: Published | None = None

    @property
    def roomy(self) -> int:
        """The most planned bytes of a device that still fit with the margin that published trainings needed."""
        return self.device if self.published is None else int(self.device / (1 + max(0.0, self.published.high)))

    def lack(self, outcome: Outcome) -> int:
        """Returns the missing bytes, of the device and of the node."""
        missing = 0 if self.host is None else max(0, outcome.host_bytes - self.host)
        return max(0, outcome.nbytes - self.device) + missing

    def answer(self, outcome: Outcome) -> Verdict:
        """Returns whether a step with this outcome fits."""
        if self.lack(outcome):
            return Verdict.NOT
        return Verdict.TIGHT if outcome.nbytes > self.roomy else Verdict.FITS

    def merit(self, outcome: Outcome) -> tuple[int, float, int]:
        """Returns a key by which better outcomes come first: those that fit, then faster ones, with a margin if any."""
        weight = TIGHT if outcome.nbytes > self.roomy else 1.0
        return self.lack(outcome), outcome.seconds * weight, outcome.nbytes


# The search


IMPOSSIBLE = Outcome(math.inf, sys.maxsize)
"""The outcome of settings that the model refuses."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        outcomes: the outcomes of all possible settings that were tried.
        ranking: the settings that fit, fastest first; if none fit, all settings, with the least lack of memory first.
        fits: True if the first settings of `ranking` fit.
        room: the memory that there is.
    """

    outcomes: dict[Settings, Outcome]
    ranking: tuple[Settings, ...]
    fits: bool
    room: Room

    @property
    def best(self) -> Settings:
        return self.ranking[0]

    def corrected(self, exact: Mapping[Settings, Outcome]) -> SearchResult:
        """Returns the result with `exact` outcomes, that of the best settings among them.

        The others are corrected like the best one: their seconds by the same factor, their bytes by the same number.
        """
        best, rough = exact[self.best], self.outcomes[self.best]
        factor, more = best.seconds / rough.seconds, best.nbytes - rough.nbytes
        outcomes = {
            settings: exact.get(settings) or replace(each, seconds=each.seconds * factor, nbytes=each.nbytes + more)
            for settings, each in self.outcomes.items()
        }
        room, fits = self.room, not self.room.lack(best)
        others = [each for each in outcomes if each != self.best and not (fits and room.lack(outcomes[each]))]
        others.sort(key=lambda each: room.merit(outcomes[each]))
        return SearchResult(outcomes, (self.best, *others), fits, room)

    def others(self) -> Iterator[tuple[str, Settings, Outcome]]:
        """Yields for each choice its name, and the best settings that were tried and differ in this choice alone."""
        by_merit = sorted(self.outcomes, key=lambda each: self.room.merit(self.outcomes[each]))
        for name in self.best.all_in_words():
            alone = [each for each in by_merit if self.best.differing(each) in ([name], _TOGETHER.get(name))]
            if alone:
                yield name, alone[0], self.outcomes[alone[0]]


_TOGETHER = {
    "mesh": ["mesh", "micro_batches"],
    "micro_batch": ["micro_batch", "micro_batches"],
    "checkpointing": ["checkpointing", "recompute"],
}
"""Choices that are made together."""


def search(
    evaluate: Callable[[Settings], Outcome], space: Space, beginnings: Iterable[Settings], room: Room
) -> SearchResult:
    """Returns the settings that were tried, best first.

    Args:
        evaluate: returns the outcome of settings, or `IMPOSSIBLE`. It is called once for each settings.
        space: all choices.
        beginnings: the settings to begin with, of which at least one is possible.
        room: the memory that there is.
    """
    tried = _Tried(evaluate, space, room)
    for settings in beginnings:
        before = None
        while settings != before:
            before = settings
            for name in space.choices:
                settings = tried.best_in(name, settings)
            if settings == before:
                settings = min((settings, *_combined(space, tried.outcomes, settings, room)), key=tried.merit)
    possible = {settings: outcome for settings, outcome in tried.outcomes.items() if outcome is not IMPOSSIBLE}
    fitting = [settings for settings, outcome in possible.items() if not room.lack(outcome)]
    return SearchResult(possible, tuple(sorted(fitting or possible, key=tried.merit)), bool(fitting), room)


PATIENCE = 2
"""Larger sizes of an axis are not tried after this many sizes in turn that are worse than the best so far."""
SLOW = 1.2
"""An axis is not tried again if each of its sizes takes this many times as long as settings that fit."""


class _Tried:
    """The settings that a search has tried, and their `outcomes`."""

    def __init__(self, evaluate: Callable[[Settings], Outcome], space: Space, room: Room) -> None:
        self.outcomes: dict[Settings, Outcome] = {}
        self._evaluate, self._space, self._room = evaluate, space, room
        self._slow_axes: set[int] = set()

    def merit(self, settings: Settings) -> tuple[int, float, int]:
        """Returns the merit of `settings`, and tries them if they are new."""
        if settings not in self.outcomes:
            self.outcomes[settings] = self._evaluate(settings)
        return self._room.merit(self.outcomes[settings])

    def best_in(self, name: str, settings: Settings) -> Settings:
        """Returns the best of `settings` and all settings that differ from them in the choice `name`."""
        best = settings
        for number, line in enumerate(self._space.lines(settings, name)):
            if name != "mesh":
                best = min((best, *line), key=self.merit)
            elif number not in self._slow_axes:
                walked = self._walk(line, [settings] if number else [])
                best = min((best, *walked), key=self.merit)
                now = self.outcomes[settings]
                # The first line, of other numbers of replicas, needs no further reading of the model: always tried.
                if number and self._room.answer(now) is Verdict.FITS:
                    is_slow = all(self.outcomes[each].seconds > SLOW * now.seconds for each in walked)
                    self._slow_axes |= {number} if is_slow else set()
        return best

    def _walk(self, line: Iterable[Settings], known: Sequence[Settings]) -> list[Settings]:
        """Returns the settings of a line, up to `PATIENCE` in turn that are worse than the best so far, or `known`."""
        walked: list[Settings] = []
        num_worse = 0
        for each in line:
            walked.append(each)
            num_worse = 0 if min((*known, *walked), key=self.merit) == each else num_worse + 1
            if num_worse == PATIENCE:
                break
        return walked


_Change = tuple[Any, float, int, int]  # a value, and its difference in seconds, and in bytes of a device and a node

COMBINED = 8
"""The number of combinations of changes that are tried at once."""


def _combined(space: Space, outcomes: Mapping[Settings, Outcome], settings: Settings, room: Room) -> Iterator[Settings]:
    """Yields the best combinations of single changes of `settings` that were tried, as if their effects added up."""
    now = outcomes[settings]
    changes: list[list[_Change]] = [[(None, 0.0, 0, 0)] for _ in space.choices]
    for name, of_choice in zip(space.choices, changes, strict=True):
        for each in filter(outcomes.__contains__, space.changed(settings, name)):
            its = outcomes[each]
            more = its.seconds - now.seconds, its.nbytes - now.nbytes, its.host_bytes - now.host_bytes
            if min(more) < 0:  # a change that saves nothing helps no combination
                of_choice.append((getattr(each, name), *more))

    def expected(combination: tuple[_Change, ...]) -> tuple[int, float, int]:
        _, seconds, nbytes, host_bytes = zip(*combination, strict=True)
        more = Outcome(now.seconds + sum(seconds), now.nbytes + sum(nbytes), now.host_bytes + sum(host_bytes))
        return room.merit(more)

    several = (each for each in product(*changes) if sum(value is not None for value, *_ in each) > 1)
    for combination in heapq.nsmallest(COMBINED, several, key=expected):
        named = zip(space.choices, combination, strict=True)
        combined = space.with_values(settings, {name: value for name, (value, *_) in named if value is not None})
        if combined is not None:
            yield combined


def cheapest_changes(
    evaluate: Callable[[Settings], Outcome], space: Space, settings: Settings, room: Room, num: int = 3
) -> list[tuple[Settings, Outcome]]:
    """Returns the `num` best settings that fit and differ from `settings` in one choice.

    If no such settings fit, it returns the result of a search from `settings`, if that fits.
    """
    changed = {each: evaluate(each) for each in space.neighbours(settings) if each != settings}
    best_of: dict[tuple[str, ...], Settings] = {}
    for each in sorted(changed, key=lambda each: room.merit(changed[each])):
        if not room.lack(changed[each]):
            best_of.setdefault(tuple(settings.differing(each)), each)
    if best_of:
        return [(each, changed[each]) for each in list(best_of.values())[:num]]
    result = search(evaluate, space, [settings], room)
    return [(result.best, result.outcomes[result.best])] if result.fits else []


@contextmanager
def garbage_left() -> Iterator[None]:
    """A context without garbage collection, which would take a quarter of a search's time.

    Garbage from inside is freed by the next full collection.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # objects that others froze stay frozen
            gc.freeze()
            gc.unfreeze()  # now all objects belong to the oldest generation
        if is_enabled:
            gc.enable()
