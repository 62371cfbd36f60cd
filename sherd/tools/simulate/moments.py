"""The moments of a step that the schedule knows, found among the events of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sherd.schedule import actions as on
from sherd.schedule.moments import Gradients, Moment
from sherd.tools.simulate.sharded import Sharded
from sherd.tools.simulate.work import EndForward, Enter, Event, Gradient, Leave, Passed, Reached, Use, Work


def moments_of(work: Work, sharded: Sharded) -> Iterator[tuple[Event | None, tuple[Moment, ...]]]:
    """Yields each event of `work` with the moments of the schedule that it brings, and at last those after the last."""
    reading = _Reading(work, sharded)
    for event in work.events:
        yield event, tuple(reading.read(event))
    yield None, (on.EndBackward(),)


def units_around(work: Work, sharded: Sharded) -> dict[int, int]:
    """Returns the unit that each module of `work` is in, by their indices; those in none are left out."""
    unit_of = sharded.unit_of
    for number, each in enumerate(work.modules):  # those around come first
        if number not in unit_of and each.parent in unit_of:
            unit_of[number] = unit_of[each.parent]
    return unit_of


class _Reading:
    """Follows the calls of a step. A unit of several modules begins with its first module and ends with its last."""

    def __init__(self, work: Work, sharded: Sharded) -> None:
        sizes = [unit.groups for unit in sharded.units]
        used = {event.parameter for event in work.events if isinstance(event, Use)}
        around = units_around(work, sharded)
        run_again = {around.get(event.module, -1) for event in work.events if isinstance(event, Enter) and event.again}
        uses = (place for each, place in sharded.places.items() if each in used)
        self._gradients = Gradients(uses, sizes, run_again)
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
            case EndForward():
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
                    yield on.AfterBackward(unit)
            case _:
                pass
