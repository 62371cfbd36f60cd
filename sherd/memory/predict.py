"""The predicted peak of a training step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sherd.engine.moves.arrivals import BATCH_BYTES
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.seal import unit_of
from sherd.engine.run.unit import Unit
from sherd.memory.sizes import sizes_of, trainable
from sherd.memory.watch import last_step, sealed_runtime
from sherd.schedule.actions import AfterForward, BeforeForward
from sherd.schedule.forecast import Forecast, forecast
from sherd.schedule.moments import Arrival, Moment, step_of


def forecast_for(root: nn.Module, units: Sequence[Unit], unsynced: int = 0) -> Forecast:
    """The peak of a training step of `root`; units are numbered as in `units`.

    A step that was watched before is taken as it was, else one is made up from the order in which modules were
    registered, or have run.
    """
    # No unit is sealed into this one: it reads their policies as the next step will.
    state = Runtime(units).schedule.state
    sizes = [sizes_of(unit) for unit in units]
    lived = sealed_runtime(units)
    step = None if lived is None else last_step(lived)
    if step is None:
        step = step_of(_guess(root, units, lived), sizes)
    return forecast(state.specs, state.limits, sizes, step, batch_bytes=BATCH_BYTES, unsynced=unsynced)


def _guess(root: nn.Module, units: Sequence[Unit], lived: Runtime | None) -> list[Moment]:
    """What happens in forward. Units run in the order in which they have run, or else are registered; so do a unit's
    parameters, but that all of them except for the first are used after the units that it calls.

    That is the worst case: their gradients are the first to come, and wait for the first one's.
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
    """Its trainable parameters, in the order of registration."""
    uses = {
        id(each): Arrival(number, group, index)
        for group, weights in enumerate(unit.weights)
        for index, each in enumerate(trainable(weights.group.parameters))
    }
    return [uses[id(each)] for each in unit.parameters if id(each) in uses]


def _as_registered(root: nn.Module, units: Sequence[Unit]) -> list[BeforeForward | AfterForward]:
    """Units called by the units around them. One of several modules runs when the first of these does."""
    numbers = {unit.id: number for number, unit in enumerate(units)}
    calls: list[BeforeForward | AfterForward] = []

    def visit(module: nn.Module) -> None:
        unit = unit_of(module)
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
    """Calls that begin and end in the order that was learnt; none if that was not one whole forward of the root."""
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
