"""The record of a training step while it runs: where its time goes, and every byte that comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sherd._torch import group_among
from sherd.engine import Runtime, ShardedParameter, Unit, sizes_of
from sherd.errors import StateError
from sherd.memory.held import Held, alive, held_by, held_by_optimizer, together
from sherd.memory.report import root_unit
from sherd.schedule import actions as do
from sherd.schedule.moments import Arrival, MemoryKind, Moment, begins_step, in_words
from sherd.schedule.state import Live
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.collectives import collective_of
from sherd.tools.plan.marks import Marks
from sherd.tools.plan.sharding import name_of, traffic_of
from sherd.tools.plan.storages import Storages
from sherd.tools.simulate.play import OPTIMIZER_TEMPORARY
from sherd.tools.simulate.timeline import Lane, Meter, Span, Timeline, TimelineUnit
from sherd.tools.simulate.work import TensorKind
from sherd.wrap.names import plain_name

__all__ = ["Recorder", "Trace", "recording", "traced"]


@dataclass(frozen=True, slots=True)
class _Label:
    """The work of a span: its name, unit and bytes, and the lane that the host serves, compute's if it waits for none.
    Without a name it is no part of the step."""

    name: str
    unit: int = -1
    lane: Lane = Lane.COMPUTE
    nbytes: int = 0


LABELS = {
    do.Gather: ("gather", Lane.GATHER),
    do.Await: ("gather", Lane.GATHER),
    do.Reduce: ("reduce", Lane.REDUCE),
    do.FinishReduce: ("reduce", Lane.REDUCE),
}
"""The names and lanes of actions. The others free memory."""


class Trace:
    """A step that is recorded. Its `timeline` is there once the step is over."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """The step, on this rank. Raises StateError before its end."""
        if self._timeline is None:
            raise StateError("the step that is traced is not over; ask for its timeline behind the `with` block")
        return self._timeline

    def end(self, timeline: Timeline) -> None:
        """Keep the step."""
        self._timeline = timeline


@contextmanager
def traced(model: nn.Module, optimizer: Optimizer, title: str = "") -> Iterator[Trace]:
    """Record one training step, from the beginning of the `with` block until `optimizer` has stepped, or until its end.

        with traced(model, optimizer) as trace:
            loss(model(batch)).backward()
            optimizer.step()
        to_json(trace.timeline)

    Memory is that of all tensors on the model's device: what the engine and the optimizer hold by `MemoryKind`, the
    rest by `TensorKind`. Memory that ranks share with one another is no tensor's, and not counted.

    Times on the CPU are the host's: a collective takes time when it is started and when it is waited for, and compute
    stands still meanwhile. On an accelerator they are those of events on compute's stream: a collective is drawn from
    when it is queued until compute goes on behind it. Recording makes each operation slower by some microseconds.

    Args:
        model: what `fully_shard` was called on last, the root of the units. All ranks record the same step, or have
            made one before: in its first forward a model is still being prepared, together.
        optimizer: of the model.
        title: of the timeline.

    Raises:
        ModuleError: `model` is not a sharded module.
        StateError: somebody observes it already, as `track_memory` does; or its parameters have no data yet.
    """
    runtime = Runtime.of(root_unit(model, "traced"), model)
    trace, recorder = Trace(), Recorder(runtime, optimizer)
    with recording(recorder, runtime, model, optimizer):
        yield trace
        recorder.end()
    trace.end(recorder.timeline(model, title or f"{runtime.root.class_name} on {_in_ranks(runtime.root)}"))


@contextmanager
def recording(recorder: Recorder, runtime: Runtime, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Have `recorder` see what happens to the model of `runtime` and to `optimizer`. Raises as `traced` does."""
    hooks = (
        model.register_forward_hook(recorder.after_forward),
        optimizer.register_step_pre_hook(recorder.before_step),
        optimizer.register_step_post_hook(recorder.after_step),
    )
    try:
        with runtime.observed(recorder, partial(_Gradients, recorder)), recorder.storages.following():
            recorder.begin()
            yield
    finally:
        for hook in hooks:
            hook.remove()


class Recorder:
    """Sees events and actions of a runtime, gradients, and the optimizer's step. `after_each` is that of `Storages`."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer, after_each: Callable[[int], None] | None = None) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._device = runtime.root.mesh.device
        self._marks = Marks(self._device)
        self.storages = Storages(self._device.type, self._passes, self._call, after_each)
        self._done: list[tuple[_Label, int, int]] = []
        self._label, self._start = _Label(""), 0
        self._phase, self._running = "", [-1]
        self._moment: Moment | str | None = None
        self._is_over = False
        self._called = "wait"
        meshes = [weights.group.mesh for unit in runtime.units for weights in unit.weights]
        self._data_groups = {group for mesh in meshes for group in (mesh.shard_group, mesh.replicate_group)}

    # The step

    def begin(self) -> None:
        self._start = self._marks.mark()
        for number, unit in enumerate(self._runtime.units):
            self.storages.hold(number, held_by(unit))
        self._look_at_optimizer()

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._do(_Label(""))
            self._num_notes = len(self.storages.notes)

    def after_forward(self, _: nn.Module, args: object, output: object) -> None:
        """Note the logits: the largest output of a model that reads tokens."""
        numbers = [
            each for each in tensors_in(output, in_any_object=True) if each.is_floating_point() and each.dim() > 1
        ]
        has_tokens = any(each.dim() > 1 and not each.is_floating_point() for each in tensors_in(args))
        if has_tokens and numbers and self._phase == "forward" and not self._is_over:
            self.storages.expect_logits(max(numbers, key=torch.Tensor.numel))

    def before_step(self, *_: object) -> None:
        if not self._is_over:
            self._moment = "when the optimizer steps"
            self._do(_Label("optimizer"))
            self.storages.expect(OPTIMIZER_TEMPORARY, -1, self._moment)

    def after_step(self, *_: object) -> None:
        if not self._is_over:
            self._look_at_optimizer()
            self.end()

    def _look_at_optimizer(self) -> None:
        numbers = {unit.id: number for number, unit in enumerate(self._runtime.units)}
        for owner, held in held_by_optimizer(self._optimizer.state, self._device).items():
            self.storages.hold(-1 if owner is None else numbers.get(owner, -1), held)

    def _do(self, label: _Label) -> _Label:
        """Begin to do something else. Returns what was done before."""
        before, now = self._label, self._marks.mark()
        if before.name:
            self._done.append((before, self._start, now))
        self._label, self._start = label, now
        return before

    def _compute(self) -> None:
        unit = self._running[-1]
        self._do(_Label(self._phase, unit))
        self.storages.expect(TensorKind.TEMPORARY.value, unit, self._moment)

    def _passes(self, phase: str) -> None:
        if self._phase == "forward":
            self._running = [-1]
        if self._phase and not self._is_over:
            self._phase = phase
            self._compute()

    def _call(self, func: Any, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Note a collective, or the wait for one, while the engine does nothing."""
        if self._is_over or not self._phase or self._label.name != self._phase:
            return call()
        before = self._do(_Label(self._called, self._label.unit, Lane.MODEL))
        result = call()
        found = collective_of(func, args, result)
        if found is not None and group_among(args) in self._data_groups:  # a transport's second step
            self._label = _Label("all-reduce", self._label.unit, Lane.ALL_REDUCE)
        elif found is not None:
            self._called = found.kind
            self._label = replace(self._label, name=found.kind, nbytes=found.nbytes)
        self._do(before)
        return result

    # What the runtime does

    def begins(self, event: do.Event) -> None:
        if self._is_over:
            return
        self._moment = event
        match event:
            case do.BeforeForward(unit, recomputing):
                if begins_step(event) and self._phase != "forward":
                    self.storages.become(TensorKind.INPUT)
                    self._running = [-1]
                self._phase = "recompute" if recomputing else "forward"
                self._running.append(unit)
            case do.BeforeBackward(unit):
                self._phase, self._running = "backward", [unit]
                if unit != 0:
                    self.storages.expect_logits(None)
            case do.Reset():
                self._phase, self._running = "", [-1]
            case _:
                pass
        self._compute()

    def perform(self, action: do.Action, perform: Callable[[], None]) -> None:
        if self._is_over:
            perform()
            return
        number, unit = action.unit, self._runtime.units[action.unit]
        before = self._do(self._label_of(action, unit))
        self.storages.expect(MemoryKind.TRANSPORT.value, number, self._moment)
        perform()
        self.look(number)
        for other, each in enumerate(self._runtime.units if isinstance(action, do.FinishReduce) else ()):
            if each.live is Live.GATHERING:
                self.look(other)
        self._do(before)
        self.storages.expect(TensorKind.TEMPORARY.value, before.unit, self._moment)

    def ended(self, event: do.Event) -> None:
        if self._is_over:
            return
        match event:
            case do.AfterForward(unit, recomputing) if self._running[-1] == unit:
                self._running.pop()
                self._phase = "backward" if recomputing else "forward"
            case do.AfterBackward(unit, unreduced=False) if self._running == [unit]:
                self._running = [-1]
            case do.EndBackward():
                self._phase, self._running = "", [-1]
                self.storages.expect_logits(None)
            case _:
                return
        self._compute()

    def _label_of(self, action: do.Action, unit: Unit) -> _Label:
        if type(action) not in LABELS:
            return _Label("free", action.unit)
        name, lane = LABELS[type(action)]
        traffic = [*traffic_of(unit)]
        all_reduced = sum(each.all_reduced for each in traffic)
        if isinstance(action, do.FinishReduce) and all_reduced:
            return _Label("all-reduce", action.unit, Lane.ALL_REDUCE, all_reduced)
        sent = {do.Gather: [each.gathered for each in traffic], do.Reduce: [each.reduced for each in traffic]}
        return _Label(name, action.unit, lane, sum(sent.get(type(action), ())))

    def look(self, number: int, beside: Held | None = None) -> None:
        """Note what a unit holds now, and `beside`, which it holds for it."""
        self.storages.hold(number, together(beside or {}, held_by(self._runtime.units[number])))

    # Gradients

    def arrives(self, number: int, unsharded: torch.Tensor) -> None:
        if not self._is_over:
            self._moment = Arrival(number, 0, 0)
            self._compute()
            assert unsharded.grad is not None, "autograd calls the hook after it has accumulated"
            self.look(number, alive([(MemoryKind.ARRIVED, unsharded.grad)], self._device))

    def copy(self, number: int, copy: Callable[[], None]) -> None:
        if self._is_over:
            copy()
            return
        before, expected = self._do(_Label("copy in", number)), self.storages.expected
        self.storages.expect(MemoryKind.GRADIENT_ROWS.value, number, self._moment)
        copy()
        self.look(number)
        self._do(replace(before, nbytes=0))
        self.storages.expect(*expected)

    # The timeline

    def timeline(self, model: nn.Module, title: str) -> Timeline:
        """Returns the step, once it is over."""
        units, seconds = self._units(model), self._marks.seconds()
        names = [each.name for each in units]
        meter = Meter()
        for note in self.storages.before:
            meter.add(0.0, *note.kind_and_unit, note.nbytes, "")
        meter.begin_step()
        notes, now = self.storages.notes[: self._num_notes], 0.0
        for note, time in zip(notes, self._marks.between(seconds, [each.time for each in notes]), strict=True):
            now = max(now, time)  # a thread of a collective may let go of something at any time
            moment = note.moment if isinstance(note.moment, str) else in_words(note.moment, names)
            meter.add(now, *note.kind_and_unit, note.nbytes, moment)
        exposed: dict[str, float] = {}
        for label, start, end in self._done:
            if label.lane is not Lane.COMPUTE:
                exposed[label.lane.value] = exposed.get(label.lane.value, 0.0) + seconds[end] - seconds[start]
        facts = {"device": str(self._device), "ranks": _in_ranks(self._runtime.root).split()[0]}
        spans, changes = tuple(self._spans_at(seconds)), tuple(meter.changes)
        return Timeline(title, False, units, spans, changes, meter.peak, seconds[-1], facts, exposed)

    def _units(self, model: nn.Module) -> tuple[TimelineUnit, ...]:
        names = {id(module): plain_name(name) for name, module in model.named_modules(remove_duplicate=False)}
        return tuple(
            TimelineUnit.of(
                name_of(unit, names),
                unit.class_name,
                sum(each.shape.numel() for each in unit.parameters),
                sizes_of(unit),
            )
            for unit in self._runtime.units
        )

    def _spans_at(self, seconds: Sequence[float]) -> Iterator[Span]:
        """Yields the spans, where marks are at `seconds`."""
        queued: dict[tuple[str, int], tuple[_Label, int]] = {}
        for label, start, end in self._done:
            if label.lane is Lane.COMPUTE:
                yield Span(label.lane, label.name, label.unit, seconds[start], seconds[end])
                continue
            yield Span(Lane.COMPUTE, "wait", label.unit, seconds[start], seconds[end])
            if self._device.type != "cpu" and label.lane is not Lane.MODEL:
                key = "gather" if label.lane is Lane.GATHER else "reduce", label.unit
                if label.nbytes and label.name != "all-reduce":
                    queued.setdefault(key, (label, start))
                    continue
                label, start = queued.pop(key, (label, start))
            yield Span(label.lane, label.name, label.unit, seconds[start], seconds[end], label.nbytes)


def _in_ranks(unit: Unit) -> str:
    number = unit.mesh.num_shards * unit.mesh.num_replicas
    return f"{number} rank{'s' if number > 1 else ''}"


class _Gradients:
    """Sees the gradients of one group of a unit."""

    def __init__(self, recorder: Recorder, number: int, group: int, parameters: Sequence[ShardedParameter]) -> None:
        self._recorder, self._number = recorder, number

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        """Note a gradient that autograd has made and that no unit has yet."""
        self._recorder.arrives(self._number, unsharded)

    def borrowed(self) -> None:
        """Note a gradient that has become the rows."""
        self._recorder.look(self._number)

    def copy(self, copy: Callable[[], None]) -> None:
        """Note gradients that are copied into the rows."""
        self._recorder.copy(self._number, copy)

    def gives_back(self) -> None:
        """Note the rows of a reduction, and its result, before the rows are freed."""
        self._recorder.look(self._number)
