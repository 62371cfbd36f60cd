"""A step as it was predicted, or as it ran: spans on lanes and bytes over time. Reports and comparisons read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Lane(str, Enum):
    """The queues of work of one rank. The value is its name in pictures."""

    COMPUTE = "compute"
    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
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
        exposed: seconds that compute has waited for a lane, by the lane's name.
        facts: what else is to be shown, in order: names to values in words, as "tokens/s": "12,300".
    """

    title: str
    is_predicted: bool
    units: tuple[TimelineUnit, ...]
    spans: tuple[Span, ...]
    changes: tuple[Change, ...]
    peak: Peak
    seconds: float
    exposed: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
