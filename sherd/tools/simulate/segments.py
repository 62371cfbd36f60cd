"""A micro-batch cut into stretches: the operations and memory between two moments of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sherd.schedule import actions as on
from sherd.schedule.moments import BackwardGradients, Moment
from sherd.tools.simulate.saved import CopyWait, SavedCopy, SavedTensors
from sherd.tools.simulate.sharded import Sharded
from sherd.tools.simulate.work import (
    Allocate,
    BackwardBegins,
    Collective,
    Enter,
    Event,
    Gradient,
    Leave,
    Op,
    Passed,
    Reached,
    Release,
    Use,
    Wait,
    Work,
)

OPTIMIZER_TEMPORARY = "optimizer temporaries"


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Operations that follow one another, of one unit in one phase.

    Attributes:
        phase: "forward", "backward", "recompute" or "optimizer".
        unit: the index of the unit, -1 for none.
        seconds: the seconds of the operations on the device.
        num_ops: the number of operations that the host queues.
        changes: bytes that come, or go if below 0, by kind and unit. Memory is highest at the start or at the end of
            the stretch.
        tensors: the number and the bytes of each tensor that comes or goes, in order; 0 bytes for a tensor that goes.
    """

    phase: str
    unit: int
    seconds: float
    num_ops: int
    changes: tuple[tuple[str, int, int], ...]
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelCollective:
    """A collective that forward or backward calls within a unit; -1 is no unit."""

    collective: Collective
    unit: int


Part = StepSegment | ModelCollective | SavedCopy | CopyWait | tuple[Moment, ...]
"""A stretch, a collective, a copy or the wait for one, or successive moments of the schedule."""


def parts_of(work: Work, sharded: Sharded, seconds_of: Callable[[Op], float]) -> tuple[Part, ...]:
    """Returns the parts of a micro-batch in order. The remaining tensors of forward and backward go at the end."""
    return tuple(_Cutting(work, sharded, seconds_of).parts())


OptimizerPart = StepSegment | Collective | Wait
"""A stretch of an optimizer's step, a collective that begins, or the wait for one."""


def parts_of_step(
    events: Iterable[Event], seconds_of: Callable[[Op], float], share: float = 1.0
) -> Iterator[OptimizerPart]:
    """Yields the parts of an optimizer's step in order, with a `share` of its time and memory."""
    cut, sizes = _Cut(), dict[int, int]()
    for event in events:
        match event:
            case Op():
                cut.do(share * seconds_of(event))
            case Allocate(tensor, nbytes):
                sizes[tensor] = round(share * nbytes)
                cut.change(tensor, OPTIMIZER_TEMPORARY, -1, sizes[tensor])
            case Release(tensor):
                cut.change(tensor, OPTIMIZER_TEMPORARY, -1, -sizes.pop(tensor))
            case Collective(kind, nbytes, group):
                yield from cut.stretches("optimizer", -1)
                yield Collective(kind, round(share * nbytes), group)
                cut = _Cut()
            case Wait():
                yield from cut.stretches("optimizer", -1)
                yield event
                cut = _Cut()
            case _:
                pass
    yield from cut.stretches("optimizer", -1)


def read_outside(work: Work, sharded: Sharded) -> str | None:
    """Returns the name of a parameter that forward reads while no module of its unit runs, if there is one."""
    unit_of = units_around(work, sharded)
    running: list[int] = []
    for event in work.events:
        match event:
            case Enter(module):
                running.append(unit_of[module])
            case Leave():
                running.pop()
            case Use(parameter):
                used = work.parameters[parameter]
                if unit_of[used.module] not in running:
                    return used.name
            case _:
                pass
    return None


@dataclass
class _Cut:
    """A stretch in the making: changes up to the point of the most bytes are `rising`, later ones `since`."""

    seconds: float = 0.0
    num_ops: int = 0
    nbytes: int = 0
    most: int = 0
    until_most: tuple[float, int, int] = (0.0, 0, 0)
    tensors: list[tuple[int, int]] = field(default_factory=list)
    rising: Counter[tuple[str, int]] = field(default_factory=Counter)
    since: Counter[tuple[str, int]] = field(default_factory=Counter)

    def do(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_ops += 1

    def change(self, tensor: int, kind: str, unit: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if nbytes:
            self.tensors.append((tensor, max(0, nbytes)))
        self.since[kind, unit] += nbytes
        if self.nbytes > self.most:
            self.most, self.until_most = self.nbytes, (self.seconds, self.num_ops, len(self.tensors))
            self.rising.update(self.since)
            self.since.clear()

    def stretches(self, phase: str, unit: int) -> Iterator[StepSegment]:
        seconds, num_ops, number = self.until_most
        halves = (
            (seconds, num_ops, self.tensors[:number], self.rising),
            (self.seconds - seconds, self.num_ops - num_ops, self.tensors[number:], self.since),
        )
        for half_seconds, half_ops, tensors, changed in halves:
            # Bytes that go come first in the order, so that memory is not higher in between than at the end.
            by_size = sorted(changed.items(), key=lambda change: change[1])
            changes = tuple((kind, of, nbytes) for (kind, of), nbytes in by_size if nbytes)
            if half_ops or changes or tensors:
                yield StepSegment(phase, unit, half_seconds, half_ops, changes, tuple(tensors))


class _Cutting:
    """Walks through a micro-batch, with the phase and the unit that runs."""

    def __init__(self, work: Work, sharded: Sharded, seconds_of: Callable[[Op], float]) -> None:
        self._work, self._sharded, self._seconds_of = work, sharded, seconds_of
        self._unit_of = sharded.unit_of
        self._seconds: dict[Op, float] = {}
        self._alive: dict[int, tuple[str, int, int]] = {}
        self._phase, self._running = "forward", [-1]
        self._num_again = 0  # running modules that are recomputed
        self._cut = _Cut()
        self._saved = SavedTensors(sharded)

    def parts(self) -> Iterator[Part]:
        for event, moments in moments_of(self._work, self._sharded):
            phase, unit = self._phase, self._running[-1]
            if event is not None:
                if self._saved.units:
                    yield from self._move_saved(event, phase, unit)
                self._follow(event)
            if moments or isinstance(event, Collective) or (self._phase, self._running[-1]) != (phase, unit):
                yield from self._cut.stretches(phase, unit)
                self._cut = _Cut()
            if isinstance(event, Collective):
                yield ModelCollective(event, unit)
            if moments:
                yield moments
        for tensor in list(self._alive):
            self._release(tensor)
        yield from self._cut.stretches(self._phase, -1)

    def _move_saved(self, event: Event, phase: str, unit: int) -> Iterator[Part]:
        for change in self._saved.changes(event, unit, self._alive):
            if isinstance(change, SavedCopy | CopyWait):
                yield from self._cut.stretches(phase, unit)
                self._cut = _Cut()
                yield change
            else:
                kind, of, nbytes = self._alive[change.tensor]
                self._cut.change(change.tensor, kind, of, -nbytes if isinstance(change, Release) else nbytes)

    def _follow(self, event: Event) -> None:
        match event:
            case Op():
                seconds = self._seconds.get(event)
                if seconds is None:
                    seconds = self._seconds[event] = self._seconds_of(event)
                self._cut.do(seconds)
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
            case BackwardBegins():
                self._phase, self._running = "backward", [-1]
            case Reached(module) if module in self._unit_of:
                self._running = [self._unit_of[module]]
            case Passed(module) if module in self._unit_of:
                self._running = [-1]
            case _:
                pass

    def _release(self, tensor: int) -> None:
        kind, unit, nbytes = self._alive.pop(tensor)
        if tensor not in self._saved.away:
            self._cut.change(tensor, kind, unit, -nbytes)


# The moments of the schedule


def moments_of(work: Work, sharded: Sharded) -> Iterator[tuple[Event | None, tuple[Moment, ...]]]:
    """Yields each event of `work` with its moments of the schedule, and None with the moments at the end."""
    reading = _Reading(work, sharded)
    for event in work.events:
        yield event, tuple(reading.read(event))
    yield None, tuple(reading.end())


def units_around(work: Work, sharded: Sharded) -> dict[int, int]:
    """Returns the unit of each module of `work`, both by index, without modules outside of units."""
    unit_of = sharded.unit_of
    for number, each in enumerate(work.modules):  # a parent comes before its children
        if number not in unit_of and each.parent in unit_of:
            unit_of[number] = unit_of[each.parent]
    return unit_of


class _Reading:
    """Follows the calls of a step. A unit of several modules begins with the first module and ends with the last."""

    def __init__(self, work: Work, sharded: Sharded) -> None:
        sizes = [unit.groups for unit in sharded.units]
        used = {event.parameter for event in work.events if isinstance(event, Use)}
        around = units_around(work, sharded)
        run_again = {around.get(event.module, -1) for event in work.events if isinstance(event, Enter) and event.again}
        uses = (place for each, place in sharded.places.items() if each in used)
        self._gradients = BackwardGradients(uses, sizes, run_again)
        self.end = self._gradients.end
        self._places = sharded.places
        self._unit_of = sharded.unit_of
        self._num_modules = [len(unit.modules) for unit in sharded.units]
        self._begun: Counter[tuple[int, bool]] = Counter()
        self._ended: Counter[tuple[int, bool]] = Counter()
        self._reached: set[int] = set()
        self._passed: Counter[int] = Counter()

    def read(self, event: Event) -> Iterator[Moment]:
        match event:
            case Enter(module, again) if module in self._unit_of:
                unit = self._unit_of[module]
                self._begun[unit, again] += 1
                if (self._begun[unit, again] - 1) % self._num_modules[unit] == 0:
                    yield on.BeforeForward(unit, again)
            case Leave(module, again) if module in self._unit_of:
                unit = self._unit_of[module]
                self._ended[unit, again] += 1
                if self._ended[unit, again] % self._num_modules[unit] == 0:
                    yield on.AfterForward(unit, again)
            case BackwardBegins():
                yield on.EndForward()
            case Reached(module) if module in self._unit_of:
                unit = self._unit_of[module]
                if unit not in self._reached:
                    self._reached.add(unit)
                    yield on.BeforeBackward(unit)
            case Gradient(parameter) if parameter in self._places:
                yield from self._gradients.arrive(self._places[parameter])
            case Passed(module) if module in self._unit_of:
                unit = self._unit_of[module]
                self._passed[unit] += 1
                if self._passed[unit] == self._num_modules[unit]:
                    self._reached.discard(unit)
                    self._passed[unit] = 0
                    yield self._gradients.passed(unit)
            case _:
                pass
