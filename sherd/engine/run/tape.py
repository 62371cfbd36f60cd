"""The tape: the schedule's answers as calls, which a steady-state step plays without any decision.

    event           the schedule's edge                    its calls, bound once
    BeforeForward   Await(2), Gather(3)                    unit2.wait(), unit3.gather()
                    with a monitor                        monitor.waits(unit2.wait), monitor.starts(unit3.gather)

The calls look at the groups and the policy of a unit when they are played. Changing them needs no rebinding; a
new edge does, and an observer that comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, Protocol

import torch

from sherd._torch import are_transforms_active, outside_transforms, set_grad_enabled
from sherd.engine.run.monitor import CollectiveMonitor, monitored
from sherd.engine.run.unit import Unit
from sherd.schedule import actions as do
from sherd.schedule.actions import Action, Event
from sherd.schedule.schedule import MOST_NODES, Edge, Schedule

P = ParamSpec("P")

DO: dict[type[Action], Callable[[Unit], None]] = {
    do.Gather: Unit.gather,
    do.Await: Unit.wait,
    do.Free: Unit.free,
    do.Collect: Unit.collect,
    do.Shrink: Unit.shrink,
    do.Reduce: Unit.reduce,
    do.FinishReduce: Unit.finish_reduce,
    do.Discard: Unit.discard,
}
"""By type of action: the method that carries it out on all groups of a unit."""


def bound(action: Action, unit: Unit) -> Callable[[], None]:
    """Returns the call that carries out `action` on `unit`."""
    if isinstance(action, do.FreeGroup):
        group = action.group
        return lambda: unit.weights[group].free(unit.policy.keeps_storage)
    if isinstance(action, do.GatherMore):
        return partial(unit.gather_more, action.left)
    if isinstance(action, do.Gather) and action.left:
        return partial(unit.gather_but, action.left)
    return partial(DO[type(action)], unit)


class Observer(Protocol):
    """An object that sees what happens in a runtime, as a watch over its memory."""

    def begins(self, event: Event) -> None:
        """Note that `event` is about to be given to the schedule."""

    def perform(self, action: Action, perform: Callable[[], None]) -> None:
        """Carry out `action` by a call of `perform`."""

    def ended(self, event: Event) -> None:
        """Note that all actions of `event` are done."""


class Tape:
    """Plays the answers of `schedule` on `units`. `monitors`: by the id of a unit, the monitor of its collectives.

    Attributes:
        observer: sees all events and actions, if there is one.
        is_astray: an action has raised, and no reset has followed.
    """

    def __init__(self, schedule: Schedule, units: Sequence[Unit], monitors: Mapping[int, CollectiveMonitor]) -> None:
        self.observer: Observer | None = None
        self.is_astray = False
        self._schedule, self._units, self._monitors = schedule, units, monitors
        # Here and not on the edges: edges form circles, which would hold the units of a deleted model.
        self._calls: dict[Edge, tuple[Callable[[], None], ...]] = {}

    def play(self, event_type: Callable[P, Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Carry out the schedule's answer to the event `event_type(*args)`."""
        edge = self._schedule.follow(event_type, *args, **kwargs)
        is_grad_enabled = False
        try:
            if edge not in self._calls:
                self._bind(edge)
            calls = self._calls[edge]
            if not calls:
                return
            is_grad_enabled = torch.is_grad_enabled()
            if is_grad_enabled:
                # Two calls in C: gathers are no part of the user's graph, and `torch.no_grad()` would make an object.
                set_grad_enabled(False)
            for call in (partial(_play_outside_transforms, calls),) if are_transforms_active() else calls:
                call()
        # Ctrl-C, too, may leave a unit in another form than the schedule's state says.
        except BaseException:
            self.is_astray = True
            raise
        finally:
            if is_grad_enabled:
                set_grad_enabled(True)

    def _bind(self, edge: Edge) -> None:
        if len(self._calls) >= MOST_NODES:
            self._calls.clear()  # the schedule drops its graph, too
        calls, observer = [], self.observer
        for action in edge.actions:
            unit = self._units[action.unit]
            call = monitored(self._monitors.get(unit.id), action, unit, bound(action, unit))
            calls.append(call if observer is None else partial(observer.perform, action, call))
        if observer is not None:
            calls = [partial(observer.begins, edge.event), *calls, partial(observer.ended, edge.event)]
        self._calls[edge] = tuple(calls)

    def recovered(self) -> None:
        """Note that all units are reset after an action that raised."""
        self.is_astray = False

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Let `observer` see all events and actions inside the context."""
        self.observer = observer
        self._calls.clear()
        try:
            yield
        finally:
            self.observer = None
            self._calls.clear()


def _play_outside_transforms(calls: Sequence[Callable[[], None]]) -> None:
    """Play `calls` outside of `vmap` and `grad`, at whose end tensors gathered inside would be gone."""
    with outside_transforms():
        for call in calls:
            call()
