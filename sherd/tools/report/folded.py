"""A timeline folded into what pictures need: bytes by kind at few moments, spans in columns, units with their likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sherd.schedule.moments import MemoryKind
from sherd.tools.simulate.timeline import Lane, Span, Timeline, TimelineUnit
from sherd.tools.simulate.work import TensorKind

__all__ = ["Branch", "Levels", "branches", "exposed_wait", "is_exposed", "kinds_of", "levels", "longest"]

OTHER = "other"
KINDS, PARTS, SPANS = 8, 800, 30_000
"""The most kinds of memory, parts of the step and spans that a page tells apart."""
BOTTOM = (MemoryKind.SHARDS, MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS, MemoryKind.PART, TensorKind.INPUT)
"""The kinds at the bottom of the stack, which change least. Above are activations, and then what comes and goes."""
USUAL = (*BOTTOM[:3], TensorKind.ACTIVATION, TensorKind.TEMPORARY, MemoryKind.UNSHARDED, TensorKind.LOGITS)
"""The kinds whose colours are the same on all pages."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The bytes of each kind from each moment until the next: `of[kind][i]` from `times[i]` on, in seconds."""

    times: list[float]
    of: dict[str, list[int]]

    @property
    def most(self) -> int:
        """The most bytes of all kinds at a moment."""
        return max(map(sum, zip(*self.of.values(), strict=True)), default=0)


def kinds_of(timelines: Sequence[Timeline]) -> dict[str, int]:
    """Returns the kinds that take most, from the bottom of the stack to its top, each with the number of its colour.
    The others are one: `other`."""
    most: Counter[str] = Counter()
    for timeline in timelines:
        now: Counter[str] = Counter()
        for change in timeline.changes:
            now[change.kind] += change.nbytes
            most[change.kind] = max(most[change.kind], now[change.kind])
    ranked = [kind for kind, nbytes in most.most_common() if nbytes > 0]
    named = ranked if len(ranked) <= KINDS else [*ranked[: KINDS - 1], OTHER]
    order = [*BOTTOM, TensorKind.ACTIVATION, TensorKind.LOGITS, *MemoryKind]
    place = {kind.value: number for number, kind in reversed(list(enumerate(order)))}
    left = iter(sorted(set(range(KINDS)) - {USUAL.index(kind) for kind in named if kind in USUAL}))
    kinds = sorted(named, key=lambda kind: place.get(kind, len(order)))
    return {kind: USUAL.index(kind) if kind in USUAL else next(left) for kind in kinds}


def levels(timeline: Timeline, kinds: Iterable[str]) -> Levels:
    """Returns the memory over the step. Of each of its parts, the fullest moment and the last one are kept."""
    now = dict.fromkeys(kinds, 0)
    fullest: dict[int, tuple[float, list[int]]] = {}
    last: dict[int, tuple[float, list[int]]] = {}
    for time, changes in groupby(timeline.changes, lambda change: change.time):
        for change in changes:  # what changes at once is one moment
            kind = change.kind if change.kind in now else OTHER
            if kind in now:  # a kind that never takes anything is none of `kinds`
                now[kind] += change.nbytes
        part = min(int(time / timeline.seconds * PARTS), PARTS) if time else -1  # the beginning is always kept
        last[part] = time, list(now.values())
        if part not in fullest or sum(now.values()) > sum(fullest[part][1]):
            fullest[part] = last[part]
    moments = sorted([*fullest.values(), *(last[part] for part in last if last[part] is not fullest[part])])
    columns = list(zip(*(row for _, row in moments), strict=True)) or [()] * len(now)
    of = {kind: [max(nbytes, 0) for nbytes in column] for kind, column in zip(now, columns, strict=True)}
    return Levels([time for time, _ in moments], of)


def longest(spans: Sequence[Span], most: int = SPANS) -> list[Span]:
    """Returns the `most` longest of `spans`, in their order."""
    if len(spans) <= most:
        return list(spans)
    shortest = sorted((span.end - span.start for span in spans), reverse=True)[most]
    return [span for span in spans if span.end - span.start > shortest]


def exposed_wait(timeline: Timeline) -> float:
    """Returns the seconds in which compute waits for another lane."""
    return sum(span.end - span.start for span in timeline.spans if is_exposed(span))


def is_exposed(span: Span) -> bool:
    """Returns whether compute waits for another lane."""
    return span.lane is Lane.COMPUTE and span.name == "wait"


@dataclass(frozen=True, slots=True)
class Branch:
    """A unit of the tree, the units below it, and the neighbours that are the same but for their names."""

    unit: TimelineUnit
    below: tuple[Branch, ...]
    alike: tuple[str, ...] = ()

    def form(self) -> object:
        """Returns what two branches have in common if they are alike."""
        unit, start = self.unit, len(self.unit.name)
        below = [(each.unit.name[start:], each.form(), len(each.alike)) for each in self.below]
        return unit.kind, unit.numel, unit.unsharded_bytes, unit.shard_bytes, below


def branches(units: Sequence[TimelineUnit]) -> list[Branch]:
    """Returns the tree of `units` by their names, neighbours that are alike folded into the first of them."""
    below: dict[int, list[int]] = {number: [] for number in range(-1, len(units))}
    path: list[int] = []
    for number in sorted(
        range(len(units)), key=lambda number: units[number].name.split(".") * (units[number].name != "")
    ):
        while path and not _is_inside(units[number].name, units[path[-1]].name):
            path.pop()
        below[path[-1] if path else -1].append(number)
        path.append(number)

    def grown(number: int) -> Iterator[Branch]:
        """Yields the branches below a unit, in the order of the units."""
        found = [Branch(units[each], tuple(grown(each))) for each in sorted(below[number])]
        for _, group in groupby(found, Branch.form):
            first, *others = group
            yield Branch(first.unit, first.below, tuple(other.unit.name for other in others))

    return list(grown(-1))


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
