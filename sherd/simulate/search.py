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
    """The seconds of a step under some settings, and the bytes that it takes of a device; `host_bytes` of its host."""

    seconds: float
    nbytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that there are, on a device and for it on its host."""

    nbytes: int
    host_bytes: int

    def lacks(self, outcome: Outcome) -> int:
        """Returns the bytes that `outcome` takes beyond the limit; 0 if it fits."""
        return max(0, outcome.nbytes - self.nbytes) + max(0, outcome.host_bytes - self.host_bytes)


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        outcomes: of all settings that were tried.
        ranking: those that fit, fastest first; if none does, all, the one that lacks least first.
        fits: whether the first one of `ranking` does.
    """

    outcomes: dict[Settings, Outcome]
    ranking: tuple[Settings, ...]
    fits: bool

    @property
    def best(self) -> Settings:
        """The first one of the ranking."""
        return self.ranking[0]

    def reasons(self) -> Iterator[tuple[str, Settings, Outcome]]:
        """Yields for each choice of the best settings its name, and the best ones that choose otherwise in it alone."""
        for name in self.best.in_words():
            others = [each for each in self.ranking if each.differing(self.best) in ([name], _WITH.get(name))]
            others += [each for each in self.outcomes if each.differing(self.best) in ([name], _WITH.get(name))]
            if others:
                yield name, others[0], self.outcomes[others[0]]


_WITH = {"micro_batch": ["micro_batch", "micro_batches"]}
"""Choices that are made together."""


def search(
    evaluate: Callable[[Settings], Outcome], space: Space, beginnings: Iterable[Settings], limit: Limit
) -> Found:
    """Returns the settings that were tried, best first. `evaluate` is called once for each.

    Args:
        evaluate: tells what a step takes.
        space: the choices that there are.
        beginnings: the settings that are tried first.
        limit: the memory that there is.
    """
    outcomes: dict[Settings, Outcome] = {}

    def merit(settings: Settings) -> tuple[int, float, int]:
        if settings not in outcomes:
            outcomes[settings] = evaluate(settings)
        outcome = outcomes[settings]
        return limit.lacks(outcome), outcome.seconds, outcome.nbytes

    for settings in beginnings:
        better: Settings | None = settings
        while better is not None:
            settings = better
            nearest = min(space.neighbours(settings), key=merit)
            better = nearest if merit(nearest) < merit(settings) else None
    fitting = [settings for settings, outcome in outcomes.items() if not limit.lacks(outcome)]
    return Found(outcomes, tuple(sorted(fitting or outcomes, key=merit)), bool(fitting))
