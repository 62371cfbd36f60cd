"""A micro-batch cut into stretches: what is computed, allocated and released between two moments of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sherd.schedule.moments import Moment
from sherd.tools.simulate.moments import moments_of, units_around
from sherd.tools.simulate.sharded import Sharded
from sherd.tools.simulate.work import (
    Allocate,
    Collective,
    EndForward,
    Enter,
    Event,
    Leave,
    Op,
    Passed,
    Reached,
    Release,
    Use,
    Work,
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Operations that follow one another, of one unit in one phase.

    Attributes:
        phase: "forward", "backward" or "recompute".
        unit: the index of the unit, -1 for none.
        seconds: that they take on the device.
        num_ops: that the host queues.
        changes: bytes that come, or go below 0, by kind and unit. There are most at the end of the stretch, or at its
            beginning.
        tensors: the same one by one and in order: the number of a tensor, and its bytes, 0 for one that goes.
    """

    phase: str
    unit: int
    seconds: float
    num_ops: int
    changes: tuple[tuple[str, int, int], ...]
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Called:
    """A collective that forward or backward calls within a unit, -1 for none."""

    collective: Collective
    unit: int


Part = Stretch | Called | tuple[Moment, ...]
"""A stretch, a collective, or moments of the schedule that come one after the other."""


def parts_of(work: Work, sharded: Sharded, seconds_of: Callable[[Op], float]) -> tuple[Part, ...]:
    """Returns the parts of a micro-batch in their order. What forward and backward have left goes at the end."""
    return tuple(_Cutting(work, sharded, seconds_of).parts())


def read_outside(work: Work, sharded: Sharded) -> str | None:
    """Returns the name of a parameter that forward reads while no module of its unit runs; None if there is none."""
    unit_of = units_around(work, sharded)
    running: list[int] = []
    for event in work.events:
        match event:
            case Enter(module):
                running.append(unit_of[module])
            case Leave():
                running.pop()
            case Use(parameter):
                found = work.parameters[parameter]
                if unit_of[found.module] not in running:
                    return found.name
            case _:
                pass
    return None


@dataclass
class _Cut:
    """A stretch that is being made: the seconds, operations and tensors until the most bytes, and what changes until
    then and since."""

    seconds: float = 0.0
    num_ops: int = 0
    nbytes: int = 0
    most: int = 0
    until_most: tuple[float, int, int] = (0.0, 0, 0)
    tensors: list[tuple[int, int]] = field(default_factory=list)
    rising: Counter[tuple[str, int]] = field(default_factory=Counter)
    since: Counter[tuple[str, int]] = field(default_factory=Counter)

    def change(self, tensor: int, kind: str, unit: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if nbytes:
            self.tensors.append((tensor, max(0, nbytes)))
        self.since[kind, unit] += nbytes
        if self.nbytes > self.most:
            self.most, self.until_most = self.nbytes, (self.seconds, self.num_ops, len(self.tensors))
            self.rising.update(self.since)
            self.since.clear()

    def stretches(self, phase: str, unit: int) -> Iterator[Stretch]:
        seconds, num_ops, number = self.until_most
        halves = (
            (seconds, num_ops, self.tensors[:number], self.rising),
            (self.seconds - seconds, self.num_ops - num_ops, self.tensors[number:], self.since),
        )
        for its_seconds, its_ops, tensors, changed in halves:
            # What goes comes first: there are never more bytes than when all has changed.
            by_size = sorted(changed.items(), key=lambda change: change[1])
            changes = tuple((kind, of, nbytes) for (kind, of), nbytes in by_size if nbytes)
            if its_ops or changes or tensors:
                yield Stretch(phase, unit, its_seconds, its_ops, changes, tuple(tensors))


class _Cutting:
    """Walks through a micro-batch, and knows the phase and the unit that runs."""

    def __init__(self, work: Work, sharded: Sharded, seconds_of: Callable[[Op], float]) -> None:
        self._work, self._sharded, self._seconds_of = work, sharded, seconds_of
        self._unit_of = sharded.unit_of
        self._seconds: dict[Op, float] = {}
        self._alive: dict[int, tuple[str, int, int]] = {}
        self._phase, self._running = "forward", [-1]
        self._num_again = 0  # modules around that run once more
        self._cut = _Cut()

    def parts(self) -> Iterator[Part]:
        for event, moments in moments_of(self._work, self._sharded):
            phase, unit = self._phase, self._running[-1]
            if event is not None:
                self._follow(event)
            if moments or isinstance(event, Collective) or (self._phase, self._running[-1]) != (phase, unit):
                yield from self._cut.stretches(phase, unit)
                self._cut = _Cut()
            if isinstance(event, Collective):
                yield Called(event, unit)
            if moments:
                yield moments
        for tensor in list(self._alive):
            self._release(tensor)
        yield from self._cut.stretches(self._phase, -1)

    def _follow(self, event: Event) -> None:
        match event:
            case Op():
                seconds = self._seconds.get(event)
                if seconds is None:
                    seconds = self._seconds[event] = self._seconds_of(event)
                self._cut.seconds += seconds
                self._cut.num_ops += 1
            case Allocate(tensor, nbytes, kind):
                self._alive[tensor] = kind.value, self._running[-1], nbytes
                self._cut.change(tensor, kind.value, self._running[-1], nbytes)
            case Release(tensor):
                self._release(tensor)
            case Enter(module, again):
                self._num_again += again
                self._phase = "recompute" if again else self._phase
                self._running.append(self._unit_of.get(module, self._running[-1]))
            case Leave(_, again):
                self._num_again -= again
                self._phase = "backward" if again and not self._num_again else self._phase
                self._running.pop()
            case EndForward():
                self._phase, self._running = "backward", [-1]
            case Reached(module) if module in self._unit_of:
                self._running = [self._unit_of[module]]
            case Passed(module) if module in self._unit_of:
                self._running = [-1]
            case _:
                pass

    def _release(self, tensor: int) -> None:
        kind, unit, nbytes = self._alive.pop(tensor)
        self._cut.change(tensor, kind, unit, -nbytes)
