"""The memory meter: bytes alive by kind and unit, over time, and their peak."""

from __future__ import annotations

from collections import Counter

from sherd.tools.simulate.timeline import Change, Peak


class Meter:
    """Adds up what comes and goes. `changes` are all of it since the step began, the first of them what was there.

    Bytes are counted in the order of the host's calls, as an allocator counts them.
    """

    def __init__(self) -> None:
        self.now = 0
        self.changes: list[Change] = []
        self._peak = 0
        self._num_to_peak = 0
        self._moment = ""

    def begin_step(self) -> None:
        """Begin a step, with what is there now at its time 0."""
        held: Counter[tuple[str, int]] = Counter()
        for change in self.changes:
            held[change.kind, change.unit] += change.nbytes
        self.changes = [Change(0.0, kind, unit, nbytes) for (kind, unit), nbytes in held.items() if nbytes]
        self._note_peak("at rest")

    def add(self, time: float, kind: str, unit: int, nbytes: int, moment: str) -> None:
        """Note bytes that come, or go below 0."""
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
