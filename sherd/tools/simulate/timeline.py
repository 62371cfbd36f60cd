"""A predicted or recorded step: spans on lanes, and bytes over time. Reports and comparisons read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from sherd.schedule.moments import GroupSizes

Key = TypeVar("Key", bound=Hashable)


class Lane(str, Enum):
    """The queues of work of one rank. The value is its name in pictures."""

    COMPUTE = "compute"
    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    MODEL = "model parallel"
    """Collectives that forward and backward themselves call, and what pipeline stages send. Compute waits for them."""
    MATRICES = "matrices"
    """Shards of matrices on the way to the ranks that compute their updates, and of updates on the way back."""
    COPY = "host copies"
    """From the host to the device."""
    BACK = "copies to the host"
    HOST = "steps of the host"


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Work on a lane, in seconds since the step began.

    Attributes:
        name: the work: `forward`, `backward`, `recompute`, `gather`, `reduce`, `wait`, `copy`, `optimizer`.
        unit: the index of the unit, -1 for none.
        nbytes: the bytes that the rank sends in a collective.
    """

    lane: Lane
    name: str
    unit: int
    start: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that come, or go if below 0. `kind` is a value of `MemoryKind` or `TensorKind`; `unit` is -1 for none."""

    time: float
    kind: str
    unit: int
    nbytes: int


def most_of(changes: Iterable[Change], key: Callable[[Change], Key]) -> dict[Key, int]:
    """Returns the most bytes at once of each part that `key` tells apart, in the order of their first changes."""
    now: Counter[Key] = Counter()
    most: dict[Key, int] = {}
    for change in changes:
        part = key(change)
        now[part] += change.nbytes
        most[part] = max(most.get(part, 0), now[part])
    return most


@dataclass(frozen=True, slots=True)
class TimelineUnit:
    """A unit: its name, the name of its modules' class, and the bytes of its unsharded parameters and of the shards."""

    name: str
    kind: str
    numel: int
    unsharded_bytes: int
    shard_bytes: int

    @classmethod
    def of(cls, name: str, kind: str, numel: int, groups: Sequence[GroupSizes]) -> TimelineUnit:
        """Returns the unit with the buffers of `groups`."""
        unsharded, shards = sum(each.unsharded + each.kept for each in groups), sum(each.shards for each in groups)
        return cls(name, kind, numel, unsharded, shards)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once.

    Attributes:
        time: seconds since the step began.
        moment: the moment in words, as "when backward reaches layers.3".
        by_kind: the bytes of each kind; their sum is `nbytes`.
        by_unit: the bytes of each unit; their sum is `nbytes`.
    """

    nbytes: int
    time: float
    moment: str
    by_kind: dict[str, int]
    by_unit: dict[int, int]


class Meter:
    """The memory meter: adds up bytes that come and go, in the order of the host's calls, as an allocator does."""

    def __init__(self) -> None:
        self.now = 0
        self.changes: list[Change] = []
        """All changes since the step began, after the bytes that were there before."""
        self._peak = 0
        self._num_to_peak = 0
        self._moment = ""

    def begin_step(self) -> None:
        """Begin a step, with the present bytes at time 0."""
        present: Counter[tuple[str, int]] = Counter()
        for change in self.changes:
            present[change.kind, change.unit] += change.nbytes
        self.changes = [Change(0.0, kind, unit, nbytes) for (kind, unit), nbytes in present.items() if nbytes]
        self._note_peak("at rest")

    def add(self, time: float, kind: str, unit: int, nbytes: int, moment: str) -> None:
        if nbytes:
            self.changes.append(Change(time, kind, unit, nbytes))
            self.now += nbytes
            if self.now > self._peak:
                self._note_peak(moment)

    @property
    def peak(self) -> Peak:
        """The most bytes at once since the step began."""
        by_kind: Counter[str] = Counter()
        by_unit: Counter[int] = Counter()
        for change in self.changes[: self._num_to_peak]:
            by_kind[change.kind] += change.nbytes
            by_unit[change.unit] += change.nbytes
        time = self.changes[self._num_to_peak - 1].time if self._num_to_peak else 0.0
        kinds = {kind: nbytes for kind, nbytes in by_kind.most_common() if nbytes}
        return Peak(self._peak, time, self._moment, kinds, {unit: each for unit, each in by_unit.items() if each})

    def _note_peak(self, moment: str) -> None:
        self._peak, self._num_to_peak, self._moment = self.now, len(self.changes), moment


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank.

    Attributes:
        title: the title of reports, as "gpt2 on 8 ranks".
        is_predicted: True if the step was simulated, False if it was recorded.
        units: the units in the order of the schedule: the root first.
        changes: the changes of memory in the order of time. Those at time 0 are the bytes when the step begins.
        seconds: from the start of the first micro-batch to the end of the optimizer's step.
        facts: further facts for reports, in order: names to values in words, as "tokens/s": "12,300".
        exposed: the seconds for which compute waited for a lane, by the lane's name.
        lines: bytes to mark in charts of memory, by name, as the limit.
    """

    title: str
    is_predicted: bool
    units: tuple[TimelineUnit, ...]
    spans: tuple[LaneSpan, ...]
    changes: tuple[Change, ...]
    peak: Peak
    seconds: float
    facts: dict[str, str] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that were tried: the seconds of a step, and its bytes on a device.

    Attributes:
        fits: True if they are within the limit of memory and all other limits of the user.
        why: the reason why the settings do not fit, in words; empty if they fit.
    """

    name: str
    settings: dict[str, str]
    step_seconds: float
    peak_bytes: int
    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class TriedSettings:
    """The settings that were tried, the index of the best (-1: none fits), and the bytes of a device if known."""

    candidates: tuple[Candidate, ...]
    best: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the settings, in words: the bytes of the peak that it saves, and the seconds of a step it costs."""

    change: str
    saves_bytes: int
    costs_seconds: float
