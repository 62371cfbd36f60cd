"""The search for the fastest settings that fit the memory, of which all combinations are too many to be tried.

It begins with a few. One choice after the other gets the best of its values, given the others: of settings that do not
fit, that which lacks least memory; of those that fit, the fastest (coordinate descent). Where no single change helps,
each one's difference in time and memory is known. As if these differences added up, the best combinations of changes
are looked for and tried; a better one is the next beginning.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from sherd.simulate.settings import Settings, Space


@dataclass(frozen=True, slots=True)
class Outcome:
    """The seconds of a step under some settings, and the bytes that it takes of a device."""

    seconds: float
    nbytes: int


IMPOSSIBLE = Outcome(math.inf, sys.maxsize)
"""Of settings that the model refuses."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        outcomes: of all settings that were tried and are possible.
        ranking: those that fit, fastest first; if none does, all, the one that lacks least first.
        fits: whether the first one of `ranking` does.
        limit: the bytes of a device.
    """

    outcomes: dict[Settings, Outcome]
    ranking: tuple[Settings, ...]
    fits: bool
    limit: int

    @property
    def best(self) -> Settings:
        """The first one of the ranking."""
        return self.ranking[0]

    def others(self) -> Iterator[tuple[str, Settings, Outcome]]:
        """Yields for each choice of the best settings its name, and the best settings that choose otherwise in it
        alone, of those that were tried."""
        by_merit = sorted(self.outcomes, key=lambda each: merit(self.outcomes[each], self.limit))
        for name in self.best.in_words():
            alone = [each for each in by_merit if each.differing(self.best) in ([name], _TOGETHER.get(name))]
            if alone:
                yield name, alone[0], self.outcomes[alone[0]]


_TOGETHER = {
    "mesh": ["mesh", "micro_batches"],
    "micro_batch": ["micro_batch", "micro_batches"],
    "checkpointing": ["checkpointing", "recompute"],
}
"""Choices that are made together."""


def merit(outcome: Outcome, limit: int) -> tuple[int, float, int]:
    """Returns a key by which better outcomes come first: what fits before what does not, then the faster."""
    return max(0, outcome.nbytes - limit), outcome.seconds, outcome.nbytes


def search(evaluate: Callable[[Settings], Outcome], space: Space, beginnings: Iterable[Settings], limit: int) -> Found:
    """Returns the settings that were tried, best first. `evaluate` is called once for each.

    Args:
        evaluate: tells what a step takes, or `IMPOSSIBLE`.
        space: the choices that there are.
        beginnings: the settings that are tried first, of which one is possible.
        limit: the bytes of a device.
    """
    outcomes: dict[Settings, Outcome] = {}

    def tried(settings: Settings) -> tuple[int, float, int]:
        if settings not in outcomes:
            outcomes[settings] = evaluate(settings)
        return merit(outcomes[settings], limit)

    for settings in beginnings:
        before = None
        while settings != before:
            before = settings
            for name in space.choices:
                settings = min((settings, *space.changed(settings, name)), key=tried)
            if settings == before:
                settings = min((settings, *_combined(space, outcomes, settings, limit)), key=tried)
    possible = {settings: outcome for settings, outcome in outcomes.items() if outcome is not IMPOSSIBLE}
    fitting = [settings for settings, outcome in possible.items() if outcome.nbytes <= limit]
    return Found(possible, tuple(sorted(fitting or possible, key=tried)), bool(fitting), limit)


_Change = tuple[Any, float, int]  # a value, and its difference in seconds and bytes

COMBINED = 8
"""So many combinations of changes are tried at once."""


def _combined(space: Space, outcomes: Mapping[Settings, Outcome], settings: Settings, limit: int) -> Iterator[Settings]:
    """Yields the best combinations of changes of `settings`, whose single changes were tried, as if these added up."""
    now = outcomes[settings]
    changes: list[list[_Change]] = [[(None, 0.0, 0)] for _ in space.choices]
    for name, found in zip(space.choices, changes, strict=True):
        for each in space.changed(settings, name):
            seconds, nbytes = outcomes[each].seconds - now.seconds, outcomes[each].nbytes - now.nbytes
            if seconds < 0 or nbytes < 0:  # others help nobody
                found.append((getattr(each, name), seconds, nbytes))

    def expected(combination: tuple[_Change, ...]) -> tuple[int, float, int]:
        seconds, nbytes = sum(each[1] for each in combination), sum(each[2] for each in combination)
        return merit(Outcome(now.seconds + seconds, now.nbytes + nbytes), limit)

    several = (each for each in product(*changes) if sum(value is not None for value, *_ in each) > 1)
    for combination in heapq.nsmallest(COMBINED, several, key=expected):
        named = zip(space.choices, combination, strict=True)
        made = space.with_values(settings, {name: value for name, (value, *_) in named if value is not None})
        if made is not None:
            yield made


def cheapest_changes(
    evaluate: Callable[[Settings], Outcome], space: Space, settings: Settings, limit: int, num: int = 3
) -> list[tuple[Settings, Outcome]]:
    """Returns the `num` changes of one choice of `settings` that fit, the fastest first. Where no single one does, the
    settings that a search from here has found, if these fit."""
    changed = {each: evaluate(each) for each in space.neighbours(settings) if each != settings}
    best_of: dict[tuple[str, ...], Settings] = {}
    for each in sorted(changed, key=lambda each: changed[each].seconds):
        if changed[each].nbytes <= limit:
            best_of.setdefault(tuple(each.differing(settings)), each)
    if best_of:
        return [(each, changed[each]) for each in list(best_of.values())[:num]]
    found = search(evaluate, space, [settings], limit)
    return [(found.best, found.outcomes[found.best])] if found.fits else []
