"""The storages that units hold, by kind of memory; and a watch that measures them after every event and action."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from sherd.engine import Runtime, ShardedParameter, Unit, sizes_of
from sherd.schedule import actions as do
from sherd.schedule.actions import BeforeForward, EndBackward, Event, Reset
from sherd.schedule.forecast import Forecast
from sherd.schedule.moments import Arrival, MemoryKind, Moment, begins_step
from sherd.schedule.state import Live
from sherd.tensor.ragged import storages_of

Held = dict[int, tuple[MemoryKind, int]]
"""Storages that are allocated, by address: the kind of memory, and its bytes."""


def held_by(unit: Unit, device: torch.device | None = None) -> Held:
    """Returns the storages of `unit` on `device`, by default its mesh's. One of weights and gradients is of weights."""
    return together(held_for_gradients(unit, device), *held_by_groups(unit, device))


def held_by_groups(unit: Unit, device: torch.device | None = None) -> list[Held]:
    return [alive(weights.held(), device or unit.mesh.device) for weights in unit.weights]


def held_for_gradients(unit: Unit, device: torch.device | None = None) -> Held:
    """Returns the allocated storages of gradients, those of the optimizer's parameters among them."""
    of_groups = [each for gradients in unit.gradients for each in gradients.held()]
    params = unit.shards.optimizer_params
    of_params = [(MemoryKind.GRADIENTS, param.grad) for param in params if param.grad is not None]
    return alive(of_groups + of_params, device or unit.mesh.device)


def together(*parts: Held) -> Held:
    """Returns the union of `parts`; the last part that has an address says its kind."""
    return {address: storage for part in parts for address, storage in part.items()}


def alive(tensors: Iterable[tuple[MemoryKind, torch.Tensor]], device: torch.device) -> Held:
    """Returns the storages of `tensors` that are allocated on `device`, without those that rest elsewhere (offload)."""
    storages: Held = {}
    for kind, tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes() and storage.device.type == device.type:
                storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return storages


def bytes_of(held: Held) -> dict[MemoryKind, int]:
    sums: Counter[MemoryKind] = Counter()
    for kind, nbytes in held.values():
        sums[kind] += nbytes
    return dict(sums)


def total(held: Held) -> int:
    return sum(nbytes for _, nbytes in held.values())


def held_by_optimizer(state: Mapping[torch.Tensor, object], device: torch.device) -> dict[int | None, Held]:
    """Returns the storages of an optimizer's tensors by the id of the parameter's unit, None for no unit."""
    by_owner: dict[int | None, Held] = {}
    seen: set[int] = set()
    for parameter, values in state.items():
        record = ShardedParameter.of(parameter)
        owner = None if record is None or record.owner is None else record.owner.id
        tensors = values.values() if isinstance(values, dict) else ()
        held = alive(((MemoryKind.OPTIMIZER, each) for each in tensors if isinstance(each, torch.Tensor)), device)
        by_owner.setdefault(owner, {}).update((address, each) for address, each in held.items() if address not in seen)
        seen.update(held)
    return by_owner


def staging_bytes(units: Iterable[Unit]) -> int:
    """Returns the bytes that the units' transports share with other ranks, also for other models."""
    meshes = dict.fromkeys(mesh for unit in units for mesh in unit.meshes)
    transports = {id(each): each for mesh in meshes for each in (mesh.shard_transport, mesh.replicate_transport)}
    return sum(each.nbytes for each in transports.values())


# The watch

last_steps: weakref.WeakKeyDictionary[Runtime, tuple[Moment, ...]] = weakref.WeakKeyDictionary()
"""By runtime: the moments of the last step that was watched to its end."""
_peaks: weakref.WeakKeyDictionary[Runtime, Forecast] = weakref.WeakKeyDictionary()


def sealed_runtime(units: Sequence[Unit]) -> Runtime | None:
    """Returns the runtime in which exactly these units are sealed, in this order, or None."""
    runtime = Runtime.over(units[0])
    return runtime if runtime is not None and runtime.units == tuple(units) else None


def last_peak(units: Sequence[Unit]) -> Forecast | None:
    """Returns the peak of the last watch over these units, or None if they are sealed otherwise by now."""
    runtime = sealed_runtime(units)
    return None if runtime is None else _peaks.get(runtime)


class Watch:
    """Measures the buffers of the engine: no activations, and of a transport what `sizes_of` predicts.

    `peak` has the most bytes so far, their moment and parts; `step` the moments since the root's forward began.
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
        self._moment = moment
        if begins_step(moment):
            self.step.clear()
            self._look_at_all()  # an optimizer may have stepped, gradients may have been dropped
        self.step.append(moment)
        if isinstance(moment, Reset):
            self.step.clear()

    def look(self, number: int, *earlier: Held) -> Held:
        """Measure a unit, which held `earlier` at moments that are over. Returns its storages now."""
        for held in (*earlier, held_by(self.units[number])):
            self._see(number, held)
            self._note()
        return held

    def arrives(self, arrival: Arrival, gradient: Held) -> None:
        self.happens(arrival)
        self._see(arrival.unit, together(gradient, held_by(self.units[arrival.unit])))
        self._note()

    def reduces(self, number: int, scratch: int) -> None:
        """Note that a reduction takes `scratch` bytes of its transport, 0 when it is over."""
        self._scratch[number] = scratch

    def end(self) -> None:
        """Drop the units, so that a peak that a user keeps does not keep the model alive."""
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
    """Yields the unit's storages as its groups change one after the other, each from `before` to its storages now."""
    after, others = held_by_groups(unit), held_for_gradients(unit)
    for turn in range(len(after)):
        yield together(others, *after[:turn], before[turn] | after[turn], *before[turn + 1 :])


class _Steps:
    def __init__(self, runtime: Runtime, watch: Watch) -> None:
        self._runtime, self._watch = runtime, watch

    def begins(self, event: Event) -> None:
        self._watch.happens(event)

    def perform(self, action: do.Action, perform: Callable[[], None]) -> None:
        """Measure the unit of `action` before and after it, and between its groups."""
        unit, number = self._runtime.units[action.unit], action.unit
        self._watch.look(number)
        before = held_by_groups(unit)
        perform()
        self._look_beside(action, unit)
        between = _in_turn(unit, before) if isinstance(action, do.Await | do.Shrink) else ()
        self._watch.look(number, *between)

    def ended(self, event: Event) -> None:
        """Keep a step that was watched from the start of forward to the end of backward."""
        if isinstance(event, EndBackward) and isinstance(self._watch.step[0], BeforeForward):
            last_steps[self._runtime] = tuple(self._watch.step)

    def _look_beside(self, action: do.Action, unit: Unit) -> None:
        """Measure what `action` does to other memory than the storages of `unit`."""
        match action:
            case do.Reduce():  # takes memory of its transport
                sizes = (size for size in sizes_of(unit) if size.arriving and not size.lane_owns_rows)
                self._watch.reduces(action.unit, sum(size.scratch for size in sizes))
            case do.FinishReduce():  # gathers under way may complete in the meantime
                for number, other in enumerate(self._runtime.units):
                    if other is not unit and other.live is Live.GATHERING:
                        self._watch.look(number)
                self._watch.reduces(action.unit, 0)
            case do.Discard():
                self._watch.reduces(action.unit, 0)


class _Arrivals:
    """Observes every gradient of one group: group number `group` of unit number `number`."""

    def __init__(self, watch: Watch, number: int, group: int, parameters: Sequence[ShardedParameter]) -> None:
        self._watch, self._number, self._group, self._parameters = watch, number, group, parameters

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        assert unsharded.grad is not None, "autograd calls the hook after it has accumulated"
        num_before = sum(parameter.requires_grad for parameter in self._parameters[:index])
        # No variable holds `unsharded.grad`: it would keep the gradient alive while it is copied.
        arrival = Arrival(self._number, self._group, num_before)
        self._watch.arrives(arrival, alive([(MemoryKind.ARRIVED, unsharded.grad)], unsharded.device))

    def borrowed(self) -> None:
        self._watch.look(self._number)

    def copy(self, copy: Callable[[], None]) -> None:
        """Measure the unit while gradients are both where they waited and in the rows."""
        before = self._watch.look(self._number)
        copy()
        self._watch.look(self._number, before | held_by(self._watch.units[self._number]))

    def gives_back(self) -> None:
        """Measure the unit, and its transport, while the rows of a reduction are still allocated."""
        unit = self._watch.units[self._number]
        sizes = sizes_of(unit)[self._group]
        if sizes.lane_owns_rows:
            self._watch.reduces(self._number, sizes.scratch)
            self._watch.look(self._number)
            self._watch.reduces(self._number, 0)


@contextmanager
def watched(root: nn.Module, unit: Unit) -> Iterator[Watch]:
    """Watch the buffers of `root`, a module of `unit`.

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
