"""The predicted peak of a training step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sherd.engine import Runtime, Unit, sizes_of
from sherd.memory.watch import last_step, sealed_runtime
from sherd.schedule.actions import AfterForward, BeforeForward
from sherd.schedule.forecast import Forecast, forecast
from sherd.schedule.moments import Arrival, Moment, step_of
from sherd.schedule.state import State


def forecast_for(root: nn.Module, units: Sequence[Unit], unsynced: int = 0) -> Forecast:
    """Returns the predicted peak of a training step of `root`. Units are numbered as in `units`.

    It replays a step that was watched before. Without one, it makes up a step from the order in which modules have run,
    or else were registered.
    """
    state = state_for(root, units)
    sizes = [sizes_of(unit) for unit in units]
    lived = sealed_runtime(units)
    step = None if lived is None else last_step(lived)
    if step is None:
        step = step_of(_guess(root, units, lived), sizes)
    return forecast(state.specs, state.limits, sizes, step, batch_bytes=batch_bytes_of(units), unsynced=unsynced)


def state_for(root: nn.Module, units: Sequence[Unit]) -> State:
    """Returns the state in which the schedule of `root` begins, by the units' policies as they are now."""
    # A Runtime into which no unit is sealed: it reads the policies as the next step will.
    return Runtime(root, units).schedule.state


def batch_bytes_of(units: Sequence[Unit]) -> int:
    """Returns the bytes of small gradients that wait until they are copied together."""
    return max((weights.plan.batch_bytes for unit in units for weights in unit.weights), default=0)


def _guess(root: nn.Module, units: Sequence[Unit], lived: Runtime | None) -> list[Moment]:
    """Returns the moments of a forward. Units run in the order in which they have run, or else are registered. A unit
    uses its first parameter before the units that it calls, and the others after them.

    That is the worst case: the gradients of the others come first, and wait for that of the first parameter.
    """
    learnt = None if lived is None else lived.schedule.state
    calls = [] if learnt is None else _as_run(learnt.forward.learnt, learnt.finished.learnt)
    uses = [_uses_of(unit, number) for number, unit in enumerate(units)]
    moments: list[Moment] = []
    for call in calls or _as_registered(root, units):
        first, *others = uses[call.unit] or (None,)
        if isinstance(call, AfterForward):
            moments += [*others, call]
        else:
            moments += [call] if first is None else [call, first]
    return moments


def _uses_of(unit: Unit, number: int) -> list[Arrival]:
    """Returns the uses of a unit's trainable parameters, in the order of registration."""
    uses = {
        id(parameter): Arrival(number, group, index)
        for group, weights in enumerate(unit.weights)
        for index, parameter in enumerate(weights.group.trained)
    }
    return [uses[id(parameter)] for parameter in unit.parameters if id(parameter) in uses]


def _as_registered(root: nn.Module, units: Sequence[Unit]) -> list[BeforeForward | AfterForward]:
    """Returns the calls of units by the units around them. A unit of several modules runs when its first module
    does."""
    numbers = {unit.id: number for number, unit in enumerate(units)}
    calls: list[BeforeForward | AfterForward] = []

    def visit(module: nn.Module) -> None:
        unit = Unit.of(module)
        number = None if unit is None else numbers.pop(unit.id, None)
        if number is not None:
            calls.append(BeforeForward(number))
        for child in module.children():
            visit(child)
        if number is not None:
            calls.append(AfterForward(number))

    visit(root)
    return calls


def _as_run(begun: Sequence[int], finished: Sequence[int]) -> list[BeforeForward | AfterForward]:
    """Returns calls that begin and end in the order that was learnt, none if that was not one full forward of the
    root."""
    ahead = list(begun[::-1])
    around: list[int] = []
    calls: list[BeforeForward | AfterForward] = []
    for unit in finished:
        while around[-1:] != [unit]:
            if not ahead:
                return []
            around.append(ahead.pop())
            calls.append(BeforeForward(around[-1]))
        calls.append(AfterForward(around.pop()))
        if not around:
            return calls if unit == 0 and not ahead else []
    return []
