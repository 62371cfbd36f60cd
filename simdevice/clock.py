"""What the simulated clock says: the times of streams and of the host, and a trace of every task.

Nothing here was measured on hardware. Times follow from a machine's record (`simdevice.machines`) and the order of the
host's calls, so a program has the same times whenever and wherever it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class StreamTimes:
    """What one stream did since the clock was reset, in microseconds.

    Attributes:
        computing: in which kernels ran.
        copying: in which it copied, between devices or from and to the host.
        communicating: in which collectives and messages ran.
        waiting: in which its next task waited for communication on another stream.
        end: when its last task ends.
    """

    computing: float
    copying: float
    communicating: float
    waiting: float
    end: float

    @property
    def busy(self) -> float:
        return self.computing + self.copying + self.communicating


@dataclass(frozen=True)
class Times:
    """What all did since the clock was reset, in microseconds: `host` is the host's time, `streams` are by name."""

    host: float
    streams: dict[str, StreamTimes]

    @property
    def end(self) -> float:
        """When the last task ends, and the host has queued it."""
        return max([self.host, *(each.end for each in self.streams.values())])

    @property
    def compute(self) -> StreamTimes:
        """The stream that computes most."""
        return max(self.streams.values(), key=lambda each: each.computing, default=StreamTimes(0, 0, 0, 0, 0))

    @property
    def exposed(self) -> float:
        """How long the stream that computes most did communicate, or waited for communication, instead."""
        return self.compute.communicating + self.compute.waiting

    @property
    def idle(self) -> float:
        """How long the stream that computes most had nothing to do, up to the end."""
        return self.end - self.compute.busy


class Task(NamedTuple):
    """One task of the trace; times in microseconds."""

    stream: str
    name: str
    engine: str
    start: float
    end: float


def times_of(found: dict[str, list[float]]) -> Times:
    """Returns what the compiled part tells, by name."""
    streams = {name: StreamTimes(*values) for name, values in sorted(found.items()) if name != "host"}
    return Times(found["host"][0], streams)


def write_chrome_trace(tasks: Iterable[Task], path: str | Path) -> None:
    """Write `tasks` as a file for chrome://tracing or Perfetto, a line for each stream."""
    events = [
        {"name": each.name, "cat": each.engine, "ph": "X", "pid": "simulated", "tid": each.stream}
        | {"ts": each.start, "dur": each.end - each.start}
        for each in tasks
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
