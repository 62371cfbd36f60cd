"""What ran beside what on the device? Read from a trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
COLLECTIVES = ("nccl", "rccl", "oneccl")
"""In the names of kernels, in lower case."""


@dataclass(frozen=True, order=True)
class Span:
    """Microseconds."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


def traced(work: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """The events of a Chrome trace of what `work` runs on `device`; it is over there when this returns.

    None are found on the CPU, and where the profiler does not see the device.
    """
    activities = [each for each in torch.profiler.supported_activities() if each.name == device.type.upper()]
    if device.type == "cpu" or not activities:
        return []
    torch.accelerator.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def spans_by_stream(events: Iterable[dict[str, Any]]) -> dict[int, list[Span]]:
    """When each stream was busy: disjoint spans, in order."""
    raw: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            start = float(event["ts"])
            raw[int(event["args"]["stream"])].append(Span(start, start + float(event["dur"])))
    return {stream: joined(spans) for stream, spans in raw.items()}


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union of `spans`."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def busy(spans: Sequence[Span]) -> float:
    """Microseconds in all."""
    return sum(span.length for span in spans)


def common(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Microseconds in which both were busy; each disjoint and in order."""
    total, place = 0.0, 0
    for span in some:
        while place < len(others) and others[place].end <= span.start:
            place += 1
        for other in others[place:]:
            if other.start >= span.end:
                break
            total += min(span.end, other.end) - max(span.start, other.start)
    return total


def overlap(events: Iterable[dict[str, Any]]) -> float:
    """The share of the lanes' time in which compute was busy too. Compute is the stream that was busy longest.

    Raises:
        AssertionError: there is one stream only.
    """
    streams = spans_by_stream(events)
    compute = max(streams, key=lambda stream: busy(streams[stream]))
    lanes = joined(span for stream, spans in streams.items() if stream != compute for span in spans)
    assert lanes, f"all ran on stream {compute}"
    return common(lanes, streams[compute]) / busy(lanes)


def idle_ms(events: Iterable[dict[str, Any]]) -> float | None:
    """Milliseconds between the first and the last kernel in which the busiest stream ran nothing.

    The busiest stream is compute's. It idles while it waits for another stream, and while the host has launched
    nothing for it. None for a trace without kernels.
    """
    streams = spans_by_stream(events).values()
    if not streams:
        return None
    first, last = min(spans[0].start for spans in streams), max(spans[-1].end for spans in streams)
    return (last - first - max(map(busy, streams))) / 1e3


def exposed_ms(events: Iterable[dict[str, Any]]) -> float | None:
    """Milliseconds in which collectives ran and no other kernel did. None for a trace without collectives."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            start = float(event["ts"])
            is_collective = any(word in event["name"].lower() for word in COLLECTIVES)
            spans[is_collective].append(Span(start, start + float(event["dur"])))
    collectives = joined(spans[True])
    if not collectives:
        return None
    return (busy(collectives) - common(collectives, joined(spans[False]))) / 1e3
