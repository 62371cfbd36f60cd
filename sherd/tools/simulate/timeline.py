"""A step as it was predicted, or as it ran: spans on lanes and bytes over time. Reports and comparisons read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from sherd.schedule.moments import GroupSizes


class Lane(str, Enum):
    """The queues of work of one rank. The value is its name in pictures."""

    COMPUTE = "compute"
    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    MODEL = "model parallel"
    """Collectives that forward and backward themselves call, and what pipeline stages send. Compute waits for them."""
    COPY = "host copies"


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a lane, in seconds since the step began.

    Attributes:
        name: what is done: `forward`, `backward`, `recompute`, `gather`, `reduce`, `wait`, `copy`, `optimizer`.
        unit: the index of the unit, -1 for none.
        nbytes: bytes that the rank sends, for collectives.
    """

    lane: Lane
    name: str
    unit: int
    start: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that come (above 0) or go. `kind` is a value of `MemoryKind` or of `TensorKind`; `unit` is -1 for none."""

    time: float
    kind: str
    unit: int
    nbytes: int


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
        moment: in words, as "when backward reaches layers.3".
        by_kind, by_unit: its bytes; the sums of both are `nbytes`.
    """

    nbytes: int
    time: float
    moment: str
    by_kind: dict[str, int]
    by_unit: dict[int, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank.

    Attributes:
        title: what is shown, as "gpt2 on 8 ranks".
        is_predicted: by the simulator; otherwise it was recorded.
        units: in the order of the schedule: the root first.
        changes: in the order of time. Those at time 0 are what is there when the step begins.
        seconds: from the beginning of the first micro-batch until the optimizer has stepped.
        facts: what else is to be shown, in order: names to values in words, as "tokens/s": "12,300".
        exposed: seconds that compute has waited for a lane, by the lane's name.
    """

    title: str
    is_predicted: bool
    units: tuple[TimelineUnit, ...]
    spans: tuple[Span, ...]
    changes: tuple[Change, ...]
    peak: Peak
    seconds: float
    facts: dict[str, str] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that were tried: the time of a step with them, and the bytes that it takes of a device.

    Attributes:
        fits: within the limit of memory, and within all else that was asked for.
        why: they do not fit, in words; empty if they do.
    """

    name: str
    settings: dict[str, str]
    step_seconds: float
    peak_bytes: int
    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class Search:
    """The settings that were tried, the index of the best, -1 if none fits, and the bytes that there are if known."""

    candidates: tuple[Candidate, ...]
    best: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the settings, in words: the bytes of the peak that it saves, and the seconds of a step it costs.

    Either is below 0 where it is the other way round."""

    change: str
    saves_bytes: int
    costs_seconds: float
