"""Moments of a step that is recorded, on the host's clock or on a device's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

__all__ = ["Marks"]


class Marks:
    """Moments of a step, by number; on an accelerator also as compute's stream comes by."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.Event] = []

    def mark(self) -> int:
        """Returns the number of this moment."""
        if self._device.type != "cpu":
            self._events.append(torch.Event(self._device, enable_timing=True))
            self._events[-1].record()
        self._times.append(perf_counter())
        return len(self._times) - 1

    def seconds(self) -> list[float]:
        """Returns the seconds of each mark since the first."""
        if self._events:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(each) / 1e3 for each in self._events]
        return [each - self._times[0] for each in self._times]

    def between(self, seconds: Sequence[float], times: Sequence[float]) -> Iterator[float]:
        """Yields moments of the host's clock, which come in order, in seconds, where marks are at `seconds`."""
        at, last = 0, len(self._times) - 1
        for time in times:
            while at < last - 1 and self._times[at + 1] <= time:
                at += 1
            end = min(at + 1, last)
            width = self._times[end] - self._times[at]
            share = min(1.0, max(0.0, (time - self._times[at]) / width)) if width else 1.0
            yield seconds[at] + share * (seconds[end] - seconds[at])
