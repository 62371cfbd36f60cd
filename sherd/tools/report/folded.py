"""A timeline reduced to what a picture shows: its titles, bytes by kind at few moments, the longest spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sherd.schedule.moments import MemoryKind
from sherd.tools.simulate.timeline import Lane, LaneSpan, Timeline, most_of
from sherd.tools.simulate.work import TensorKind
from sherd.units import in_bytes

OTHER = "other"
KINDS, PARTS, SPANS = 8, 800, 10_000
"""The most kinds of memory, parts of the step, and spans on a page."""
COLORS = ("#3b5dc9", "#16577e", "#2b825a", "#a06625", "#8864b6", "#753f11", "#387a7f", "#5b2633")
"""The colours of kinds of memory. Colour-blind readers tell them apart, and from those of work: test_page.py."""
WAIT = "#b3261e"
"""The colour of waits of compute, and of the limit."""
BOTTOM = (MemoryKind.SHARDS, MemoryKind.OPTIMIZER, MemoryKind.GRADIENTS, MemoryKind.PART, TensorKind.INPUT)
"""The kinds at the bottom of the stack, which change least. Above are activations, and then short-lived memory."""
USUAL = (*BOTTOM[:3], TensorKind.ACTIVATION, TensorKind.TEMPORARY, MemoryKind.UNSHARDED, TensorKind.LOGITS)
"""The kinds that have the same colours on all pages."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The bytes of each kind over time: `of[kind][i]` from `times[i]`, in seconds, until the next moment."""

    times: list[float]
    of: dict[str, list[int]]

    @property
    def most(self) -> int:
        """The most bytes at a moment, of all kinds together."""
        return max(map(sum, zip(*self.of.values(), strict=True)), default=0)

    def at(self, number: int) -> dict[str, int]:
        """Returns the bytes of each kind from a moment on."""
        return {kind: column[number] for kind, column in self.of.items()}


def kinds_of(timelines: Sequence[Timeline]) -> dict[str, int]:
    """Returns the largest kinds, from the bottom of the stack to its top, each with the number of its colour.

    All further kinds are one: `other`.
    """
    most: Counter[str] = Counter()
    for timeline in timelines:
        for kind, nbytes in most_of(timeline.changes, lambda change: change.kind).items():
            most[kind] = max(most[kind], nbytes)
    ranked = [kind for kind, nbytes in most.most_common() if nbytes > 0]
    named = ranked if len(ranked) <= KINDS else [*ranked[: KINDS - 1], OTHER]
    order = [*BOTTOM, TensorKind.ACTIVATION, TensorKind.LOGITS, *MemoryKind]
    place = {kind.value: number for number, kind in reversed(list(enumerate(order)))}
    left = iter(sorted(set(range(KINDS)) - {USUAL.index(kind) for kind in named if kind in USUAL}))
    kinds = sorted(named, key=lambda kind: place.get(kind, len(order)))
    return {kind: USUAL.index(kind) if kind in USUAL else next(left) for kind in kinds}


def levels(timeline: Timeline, kinds: Iterable[str]) -> Levels:
    """Returns the memory over the step: the fullest and the last moment of each part of the step."""
    now = dict.fromkeys(kinds, 0)
    fullest: dict[int, tuple[float, list[int]]] = {}
    last: dict[int, tuple[float, list[int]]] = {}
    for time, changes in groupby(timeline.changes, lambda change: change.time):
        for change in changes:  # changes at the same time are one moment
            kind = change.kind if change.kind in now else OTHER
            if kind in now:  # `kinds` leaves out kinds that never have bytes
                now[kind] += change.nbytes
        part = min(int(time / timeline.seconds * PARTS), PARTS) if time else -1  # the beginning is always kept
        last[part] = time, list(now.values())
        if part not in fullest or sum(now.values()) > sum(fullest[part][1]):
            fullest[part] = last[part]
    moments = sorted([*fullest.values(), *(last[part] for part in last if last[part] is not fullest[part])])
    columns = list(zip(*(row for _, row in moments), strict=True)) or [()] * len(now)
    of = {kind: [max(nbytes, 0) for nbytes in column] for kind, column in zip(now, columns, strict=True)}
    return Levels([time for time, _ in moments], of)


def titles_of(timeline: Timeline) -> list[str]:
    """Returns two titles: what was planned or recorded on which cluster and limit; the peak, and what is reserved."""
    facts, limit = timeline.facts, timeline.lines.get("limit")
    where = [facts["cluster"]] if "cluster" in facts else []
    where += [f"limit {in_bytes(limit)}"] if limit is not None else []
    of = [timeline.title, ", ".join(where)]
    said = [f"{in_bytes(timeline.peak.nbytes)} alive {timeline.peak.moment}", facts.get("memory", "")]
    return [": ".join(filter(None, of)), "; ".join(filter(None, said))]


def top_of(timeline: Timeline, drawn: Levels) -> int:
    """Returns the bytes at the top of a chart of memory: the most, or the highest line up to twice as high."""
    most = max(drawn.most, timeline.peak.nbytes)
    return max(most, *(nbytes for nbytes in timeline.lines.values() if nbytes <= 2 * most), 0)


def longest(spans: Sequence[LaneSpan], most: int = SPANS) -> list[LaneSpan]:
    """Returns the `most` longest spans, in the order of `spans`."""
    if len(spans) <= most:
        return list(spans)
    shortest = sorted((span.end - span.start for span in spans), reverse=True)[most]
    return [span for span in spans if span.end - span.start > shortest]


def exposed_wait(timeline: Timeline) -> float:
    """Returns the seconds in which compute waits for another lane."""
    return sum(span.end - span.start for span in timeline.spans if is_exposed(span))


def is_exposed(span: LaneSpan) -> bool:
    """Returns whether compute waits for another lane."""
    return span.lane is Lane.COMPUTE and span.name == "wait"
