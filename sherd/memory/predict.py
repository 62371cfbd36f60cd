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

    It replays the last step that was watched. Without one, it makes up a step, from the order in which units ran or
    else were registered.
    """
    state = state_for(root, units)
    sizes = [sizes_of(unit) for unit in units]
    runtime = sealed_runtime(units)
    step = None if runtime is None else last_step(runtime)
    if step is None:
        step = step_of(_guess(root, units, runtime), sizes)
    return forecast(state.specs, state.limits, sizes, step, batch_bytes=batch_bytes_of(units), unsynced=unsynced)


def state_for(root: nn.Module, units: Sequence[Unit]) -> State:
    """Returns the state in which the schedule of `root` begins, by the units' current policies."""
    # No unit is sealed into this Runtime: it only reads the policies, as the next step will.
    return Runtime(root, units).schedule.state


def batch_bytes_of(units: Sequence[Unit]) -> int:
    """Returns the bytes of small gradients that wait until they are copied together."""
    return max((weights.plan.batch_bytes for unit in units for weights in unit.weights), default=0)


def _guess(root: nn.Module, units: Sequence[Unit], runtime: Runtime | None) -> list[Moment]:
    """Returns the moments of a forward, with units in the order in which they ran, or else are registered.

    A unit uses its first parameter before the units that it calls, and its other parameters after them. That is the
    worst case: the gradients of the others come first, and wait for the gradient of the first.
    """
    learnt = None if runtime is None else runtime.schedule.state
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
    """Returns the calls of units in the order of registration. A unit of several modules runs with its first one."""
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
    """Returns the calls in the learnt order, or none if that was not one whole forward of the root."""
    ahead = list(begun[::-1])
    running: list[int] = []
    calls: list[BeforeForward | AfterForward] = []
    for unit in finished:
        while running[-1:] != [unit]:
            if not ahead:
                return []
            running.append(ahead.pop())
            calls.append(BeforeForward(running[-1]))
        calls.append(AfterForward(running.pop()))
        if not running:
            return calls if unit == 0 and not ahead else []
    return []
