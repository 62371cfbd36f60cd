"""The search for the fastest settings that fit the memory: from a few beginnings, by changes of one choice at a time.

The number of all combinations grows with their product; that of the neighbours with their sum. Steps go downhill: over
settings that do not fit, to those that lack less memory; over those that fit, to the faster ones. Each beginning ends
where no single change helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sherd.simulate.settings import Settings, Space


@dataclass(frozen=True, slots=True)
class Outcome:
    """The seconds of a step under some settings, and the bytes that it takes of a device."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        outcomes: of all settings that were tried.
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


_TOGETHER = {"mesh": ["mesh", "micro_batches"], "micro_batch": ["micro_batch", "micro_batches"]}
"""Choices that are made together."""


def merit(outcome: Outcome, limit: int) -> tuple[int, float, int]:
    """Returns a key by which better outcomes come first: what fits before what does not, then the faster."""
    return max(0, outcome.nbytes - limit), outcome.seconds, outcome.nbytes


def search(evaluate: Callable[[Settings], Outcome], space: Space, beginnings: Iterable[Settings], limit: int) -> Found:
    """Returns the settings that were tried, best first. `evaluate` is called once for each.

    Args:
        evaluate: tells what a step takes.
        space: the choices that there are.
        beginnings: the settings that are tried first.
        limit: the bytes of a device.
    """
    outcomes: dict[Settings, Outcome] = {}

    def tried(settings: Settings) -> tuple[int, float, int]:
        if settings not in outcomes:
            outcomes[settings] = evaluate(settings)
        return merit(outcomes[settings], limit)

    for settings in beginnings:
        better: Settings | None = settings
        while better is not None:
            settings = better
            nearest = min(space.neighbours(settings), key=tried, default=settings)
            better = nearest if tried(nearest) < tried(settings) else None
    fitting = [settings for settings, outcome in outcomes.items() if outcome.nbytes <= limit]
    return Found(outcomes, tuple(sorted(fitting or outcomes, key=tried)), bool(fitting), limit)


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
