"""Watches the buffers of a model while it trains: looks at them after everything that happens to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from sherd.engine import Runtime, ShardedParameter, Unit, sizes_of
from sherd.memory.held import Held, alive, bytes_of, held_by, held_by_groups, held_for_gradients, together, total
from sherd.schedule import actions as do
from sherd.schedule.actions import BeforeForward, EndBackward, Event, Reset
from sherd.schedule.forecast import Forecast
from sherd.schedule.moments import Arrival, MemoryKind, Moment, begins_step
from sherd.schedule.state import Live

_watched: weakref.WeakKeyDictionary[Runtime, tuple[Moment, ...]] = weakref.WeakKeyDictionary()
"""By runtime: the moments of the last step that was watched to its end."""
_peaks: weakref.WeakKeyDictionary[Runtime, Forecast] = weakref.WeakKeyDictionary()


def last_step(runtime: Runtime) -> tuple[Moment, ...] | None:
    """Returns the step of `runtime` that was watched last, or None."""
    return _watched.get(runtime)


def sealed_runtime(units: Sequence[Unit]) -> Runtime | None:
    """Returns the runtime of exactly these units, in which they have the same numbers, or None if they are not
    sealed."""
    runtime = Runtime.over(units[0])
    return runtime if runtime is not None and runtime.units == tuple(units) else None


def last_peak(units: Sequence[Unit]) -> Forecast | None:
    """Returns the peak of the last watch over the model of `units`, if that is still sealed as it was then."""
    runtime = sealed_runtime(units)
    return None if runtime is None else _peaks.get(runtime)


class Watch:
    """The record of a model's buffers since the watch began: the `peak`, with its moment and parts, and `step`, the
    moments since the root's forward began.

    It sees only the buffers that the engine knows: no activations, and of a transport what `sizes_of` predicts.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.step: list[Moment] = []
        self.peak = Forecast(0, None, {})
        self._moment: Moment | None = None
        self._scratch = [0] * len(self.units)
        self._held: list[Held] = [{}] * len(self.units)
        self._bytes = [0] * len(self.units)
        self._look_at_all()

    def happens(self, moment: Moment) -> None:
        """Note that `moment` is about to happen."""
        self._moment = moment
        if begins_step(moment):
            self.step.clear()
            self._look_at_all()  # an optimizer may have stepped, gradients may have been dropped
        self.step.append(moment)
        if isinstance(moment, Reset):
            self.step.clear()

    def look(self, number: int, *turns: Held) -> Held:
        """Look at a unit, which held `turns` at moments that have passed. Returns what it holds now."""
        for held in (*turns, held_by(self.units[number])):
            self._see(number, held)
            self._note()
        return held

    def arrives(self, arrival: Arrival, gradient: Held) -> None:
        """Note a gradient that autograd has made and that no unit has yet."""
        self.happens(arrival)
        self._see(arrival.unit, together(gradient, held_by(self.units[arrival.unit])))
        self._note()

    def reduces(self, number: int, scratch: int) -> None:
        """Note that a reduction takes `scratch` bytes of its transport, 0 when it is over."""
        self._scratch[number] = scratch

    def end(self) -> None:
        """Stop looking, and let go of the units, so that a peak that a user keeps does not keep the model alive."""
        self.units = ()

    def _look_at_all(self) -> None:
        for number, unit in enumerate(self.units):
            self._see(number, held_by(unit))
        self._note()

    def _see(self, number: int, held: Held) -> None:
        self._held[number], self._bytes[number] = held, total(held)

    def _note(self) -> None:
        nbytes = sum(self._bytes) + sum(self._scratch)
        if nbytes > self.peak.peak:
            kinds = enumerate(map(bytes_of, self._held))
            parts = {(number, kind): part for number, of_unit in kinds for kind, part in of_unit.items()}
            parts |= {(number, MemoryKind.TRANSPORT): part for number, part in enumerate(self._scratch) if part}
            self.peak = Forecast(nbytes, self._moment, parts)


def _in_turn(unit: Unit, before: Sequence[Held]) -> Iterator[Held]:
    """Yields the storages that were alive as the groups changed one after the other: the one in turn has what it has
    now, and has not yet dropped what it had before."""
    after, others = held_by_groups(unit), held_for_gradients(unit)
    for turn in range(len(after)):
        yield together(others, *after[:turn], before[turn] | after[turn], *before[turn + 1 :])


class _Steps:
    """Sees every event and action of a runtime."""

    def __init__(self, runtime: Runtime, watch: Watch) -> None:
        self._runtime, self._watch = runtime, watch

    def begins(self, event: Event) -> None:
        """Note an event that is about to happen."""
        self._watch.happens(event)

    def perform(self, action: do.Action, perform: Callable[[], None]) -> None:
        """Look at the unit of `action` before and after it, and between its groups."""
        unit, number = self._runtime.units[action.unit], action.unit
        self._watch.look(number)
        before = held_by_groups(unit)
        perform()
        self._look_beside(action, unit)
        turns = _in_turn(unit, before) if isinstance(action, do.Await | do.Shrink) else ()
        self._watch.look(number, *turns)

    def ended(self, event: Event) -> None:
        """Keep a step that was watched from its forward's beginning to its backward's end."""
        if isinstance(event, EndBackward) and isinstance(self._watch.step[0], BeforeForward):
            _watched[self._runtime] = tuple(self._watch.step)

    def _look_beside(self, action: do.Action, unit: Unit) -> None:
        """Look at what `action` did beside `unit`: while a reduction was finished, gathers under way may have
        completed, and a reduction takes memory of its transport."""
        match action:
            case do.Reduce():
                sizes = (size for size in sizes_of(unit) if size.arriving and not size.lane_owns_rows)
                self._watch.reduces(action.unit, sum(size.scratch for size in sizes))
            case do.FinishReduce():
                for number, other in enumerate(self._runtime.units):
                    if other is not unit and other.live is Live.GATHERING:
                        self._watch.look(number)
                self._watch.reduces(action.unit, 0)
            case do.Discard():
                self._watch.reduces(action.unit, 0)


class _Arrivals:
    """Sees every gradient of one group. `number` is the number of its unit, `group` that of the group in the unit."""

    def __init__(self, watch: Watch, number: int, group: int, parameters: Sequence[ShardedParameter]) -> None:
        self._watch, self._number, self._group, self._parameters = watch, number, group, parameters

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        """Note a gradient that autograd has made and that no unit has yet."""
        assert unsharded.grad is not None, "autograd calls the hook after it has accumulated"
        num_before = sum(parameter.requires_grad for parameter in self._parameters[:index])
        # No variable holds `unsharded.grad`: it would keep the gradient alive while it is copied.
        arrival = Arrival(self._number, self._group, num_before)
        self._watch.arrives(arrival, alive([(MemoryKind.ARRIVED, unsharded.grad)], unsharded.device))

    def borrowed(self) -> None:
        """Look at the unit, whose rows are the gradient."""
        self._watch.look(self._number)

    def copy(self, copy: Callable[[], None]) -> None:
        """Look at the unit while gradients are both where they waited and in the rows."""
        before = self._watch.look(self._number)
        copy()
        self._watch.look(self._number, before | held_by(self._watch.units[self._number]))

    def gives_back(self) -> None:
        """Look at the unit while the rows of a reduction are still there, and what its transport takes."""
        unit = self._watch.units[self._number]
        sizes = sizes_of(unit)[self._group]
        if sizes.lane_owns_rows:
            self._watch.reduces(self._number, sizes.scratch)
            self._watch.look(self._number)
            self._watch.reduces(self._number, 0)


@contextmanager
def watched(root: nn.Module, unit: Unit) -> Iterator[Watch]:
    """Look at the buffers of `root`, a module of `unit`, after everything that happens to them inside.

    Raises:
        StateError: the model is watched already.
    """
    runtime = Runtime.of(unit, root)
    watch = Watch(runtime.units)
    with runtime.observed(_Steps(runtime, watch), partial(_Arrivals, watch)):
        try:
            yield watch
        finally:
            _peaks[runtime] = watch.peak
            watch.end()
