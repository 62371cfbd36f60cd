"""A training step, recorded while it runs: where its time goes, and all memory that is allocated and freed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import TorchDispatchMode, group_among, in_backward
from sherd.engine import Runtime, ShardedParameter, Unit, sizes_of
from sherd.errors import StateError
from sherd.memory.report import root_unit
from sherd.memory.watch import Held, alive, held_by, held_by_optimizer, together
from sherd.schedule import actions as do
from sherd.schedule.moments import Arrival, MemoryKind, Moment, begins_step, in_words
from sherd.schedule.state import Live
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.operations import collective_of, is_communication, tensors_among
from sherd.tools.plan.reading import is_as_logits, logits_among, reads_tokens
from sherd.tools.plan.sharding import name_of, traffic_of
from sherd.tools.simulate.segments import OPTIMIZER_TEMPORARY
from sherd.tools.simulate.timeline import Lane, LaneSpan, Meter, Timeline, TimelineUnit
from sherd.tools.simulate.work import TensorKind
from sherd.wrap.names import plain_name

__all__ = ["Note", "StepRecorder", "Storages", "Trace", "recording", "traced"]


@dataclass(frozen=True, slots=True)
class _Label:
    """The name, unit and bytes of a span, and the lane that the host serves or waits for.

    The label without a name is for work outside of the step.
    """

    name: str
    unit: int = -1
    lane: Lane = Lane.COMPUTE
    nbytes: int = 0


LABELS = {
    do.Gather: ("gather", Lane.GATHER),
    do.GatherMore: ("gather", Lane.GATHER),
    do.Await: ("gather", Lane.GATHER),
    do.Reduce: ("reduce", Lane.REDUCE),
    do.FinishReduce: ("reduce", Lane.REDUCE),
}
"""The names and lanes of actions. All other actions free memory."""


class Trace:
    """A recorded step. Its `timeline` is available after the step."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """The step, on this rank. Raises StateError before the end of the step."""
        if self._timeline is None:
            raise StateError("the step that is traced is not over; ask for its timeline behind the `with` block")
        return self._timeline

    def end(self, timeline: Timeline) -> None:
        self._timeline = timeline


@contextmanager
def traced(model: nn.Module, optimizer: Optimizer, title: str = "") -> Iterator[Trace]:
    """Record one training step, from the beginning of the `with` block to the optimizer's step or the block's end.

        with traced(model, optimizer) as trace:
            loss(model(batch)).backward()
            optimizer.step()
        to_json(trace.timeline)

    The memory is that of all tensors on the model's device: by `MemoryKind` what the engine and the optimizer hold, and
    by `TensorKind` the rest. Memory that ranks share is not counted, since it belongs to no tensor.

    On the CPU, times are the host's: a collective takes time when the host starts it and when the host waits for it,
    and nothing is computed meanwhile. On an accelerator, times are those of events on the compute stream: a collective
    lasts from its queueing until compute goes on behind it. Recording makes each operation some microseconds slower.

    Args:
        model: what `fully_shard` was called on last, the root of the units. All ranks must record the model's first
            step together, since its first forward prepares it on all ranks; later steps one rank may record alone.
        optimizer: of the model.
        title: of the timeline.

    Yields:
        The trace, whose `timeline` is available after the block.

    Raises:
        ModuleError: `model` is not a sharded module.
        StateError: the model is observed already, as by `track_memory`; or its parameters have no data yet.
    """
    runtime = Runtime.of(root_unit(model, "traced"), model)
    trace, recorder = Trace(), StepRecorder(runtime, optimizer)
    with recording(recorder, runtime, model, optimizer):
        yield trace
        recorder.end()
    trace.end(recorder.timeline(model, title or f"{runtime.root.class_name} on {_in_ranks(runtime.root)}"))


@contextmanager
def recording(recorder: StepRecorder, runtime: Runtime, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Call `recorder` for all events of `runtime`, and before and after a step of `optimizer`. Raises as `traced`."""
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


class StepRecorder:
    """Observes events and actions of a runtime, gradients, and the optimizer's step.

    `after_each` is passed on to `Storages`.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer, after_each: Callable[[int], None] | None = None) -> None:
        self._runtime, self._optimizer = runtime, optimizer
        self._device = runtime.root.mesh.device
        self._marks = _Marks(self._device)
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
        """Begin the record with the memory that is allocated before the step."""
        self._start = self._marks.mark()
        for number, unit in enumerate(self._runtime.units):
            self.storages.hold(number, held_by(unit))
        self._look_at_optimizer()

    def end(self) -> None:
        """End the record, unless the optimizer's step has ended it."""
        if not self._is_over:
            self._is_over = True
            self._do(_Label(""))
            self._num_notes = len(self.storages.notes)

    def after_forward(self, _: nn.Module, args: object, output: object) -> None:
        """Note the logits: the largest output of a model that reads tokens."""
        logits = logits_among(tensors_in(output, in_any_object=True))
        is_forward = self._phase == "forward" and not self._is_over
        if logits is not None and is_forward and reads_tokens(tensors_in(args)):
            self.storages.expect_logits(logits)

    def before_step(self, *_: object) -> None:
        if not self._is_over:
            self._moment, self._phase = "when the optimizer steps", "optimizer"
            self._do(_Label("optimizer"))
            self.storages.expect(OPTIMIZER_TEMPORARY, -1, self._moment)

    def after_step(self, *_: object) -> None:
        """The optimizer has stepped, which ends the record."""
        if not self._is_over:
            self._look_at_optimizer()
            self.end()

    def _look_at_optimizer(self) -> None:
        numbers = {unit.id: number for number, unit in enumerate(self._runtime.units)}
        for owner, held in held_by_optimizer(self._optimizer.state, self._device).items():
            self.storages.hold(-1 if owner is None else numbers.get(owner, -1), held)

    def _do(self, label: _Label) -> _Label:
        """End the current span and begin one with `label`. Returns the label of the ended span."""
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
        """Note a collective of the model or the optimizer, or the wait for one.

        Calls from inside an action are the engine's.
        """
        if self._is_over or not self._phase or self._label.name != self._phase:
            return call()
        lane = Lane.MATRICES if self._phase == "optimizer" else Lane.MODEL
        before = self._do(_Label(self._called, self._label.unit, lane))
        result = call()
        collective = collective_of(func, args, result)
        if collective is not None and lane is Lane.MODEL and group_among(args) in self._data_groups:
            # a transport's second step
            self._label = _Label("all-reduce", self._label.unit, Lane.ALL_REDUCE)
        elif collective is not None:
            self._called = collective.kind
            self._label = replace(self._label, name=collective.kind, nbytes=collective.nbytes)
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
        """Perform `action`, and note its time and the memory of its unit."""
        if self._is_over:
            perform()
            return
        number, unit = action.unit, self._runtime.units[action.unit]
        before = self._do(self._label_of(action, unit))
        self.storages.expect(MemoryKind.TRANSPORT.value, number, self._moment)
        perform()
        self.look(number)
        for other, gathering in enumerate(self._runtime.units if isinstance(action, do.FinishReduce) else ()):
            if gathering.live is Live.GATHERING:
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
            case do.AfterBackward(unit, unreduced) if self._running == [unit]:
                if not (unreduced and self._runtime.units[unit].backward.expected.reduces_when_complete):
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
        all_reduced = sum(of_group.all_reduced for of_group in traffic)
        if isinstance(action, do.FinishReduce) and all_reduced:
            return _Label("all-reduce", action.unit, Lane.ALL_REDUCE, all_reduced)
        nbytes = 0
        if isinstance(action, do.Gather | do.GatherMore):
            waiting = [of.live is Live.SHARDED for of in unit.weights]
            begins = zip(traffic[: len(traffic) - action.left], waiting, strict=False)
            nbytes = sum(of_group.gathered for of_group, waits in begins if waits)
        elif isinstance(action, do.Reduce):
            nbytes = sum(of_group.reduced for of_group in traffic)
        return _Label(name, action.unit, lane, nbytes)

    def look(self, number: int, beside: Held | None = None) -> None:
        """Note the memory that unit `number` holds now, and `beside`, which is held for the unit."""
        self.storages.hold(number, together(beside or {}, held_by(self._runtime.units[number])))

    # Gradients

    def arrives(self, number: int, unsharded: torch.Tensor) -> None:
        """Note a gradient of unit `number` that autograd has just accumulated."""
        if not self._is_over:
            self._moment = Arrival(number, 0, 0)
            self._compute()
            assert unsharded.grad is not None, "autograd calls the hook after it has accumulated"
            self.look(number, alive([(MemoryKind.ARRIVED, unsharded.grad)], self._device))

    def copy(self, number: int, copy: Callable[[], None]) -> None:
        """Copy gradients of unit `number` into rows, and note the time and the memory."""
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
        """Returns the step. Call it after the end of the step."""
        units, seconds = self._units(model), self._marks.seconds()
        names = [unit.name for unit in units]
        meter = Meter()
        for note in self.storages.before:
            meter.add(0.0, *note.kind_and_unit, note.nbytes, "")
        meter.begin_step()
        notes, now = self.storages.notes[: self._num_notes], 0.0
        times = self._marks.between(seconds, [note.time for note in notes])
        for note, time in zip(notes, times, strict=True):
            now = max(now, time)  # a thread of a collective may free memory at any time
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
                sum(parameter.shape.numel() for parameter in unit.parameters),
                sizes_of(unit),
            )
            for unit in self._runtime.units
        )

    def _spans_at(self, seconds: Sequence[float]) -> Iterator[LaneSpan]:
        """Yields the spans, with the times of marks in `seconds`."""
        queued: dict[tuple[str, int], tuple[_Label, int]] = {}
        for label, start, end in self._done:
            if label.lane is Lane.COMPUTE:
                yield LaneSpan(label.lane, label.name, label.unit, seconds[start], seconds[end])
                continue
            yield LaneSpan(Lane.COMPUTE, "wait", label.unit, seconds[start], seconds[end])
            if self._device.type != "cpu" and label.lane not in (Lane.MODEL, Lane.MATRICES):
                key = "gather" if label.lane is Lane.GATHER else "reduce", label.unit
                if label.nbytes and label.name != "all-reduce":
                    queued.setdefault(key, (label, start))
                    continue
                label, start = queued.pop(key, (label, start))
            yield LaneSpan(label.lane, label.name, label.unit, seconds[start], seconds[end], label.nbytes)


def _in_ranks(unit: Unit) -> str:
    number = unit.mesh.num_shards * unit.mesh.num_replicas
    return f"{number} rank{'s' if number > 1 else ''}"


class _Gradients:
    """Passes on what happens to the gradients of one group of a unit."""

    def __init__(self, recorder: StepRecorder, number: int, group: int, parameters: Sequence[ShardedParameter]) -> None:
        self._recorder, self._number = recorder, number

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        self._recorder.arrives(self._number, unsharded)

    def borrowed(self) -> None:
        self._recorder.look(self._number)

    def copy(self, copy: Callable[[], None]) -> None:
        self._recorder.copy(self._number, copy)

    def gives_back(self) -> None:
        """Note the rows of a reduction, and its result, before the rows are freed."""
        self._recorder.look(self._number)


class _Marks:
    """Moments of a step, by number: on the host's clock, and on an accelerator on the compute stream too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.Event] = []

    def mark(self) -> int:
        if self._device.type != "cpu":
            self._events.append(torch.Event(self._device, enable_timing=True))
            self._events[-1].record()
        self._times.append(perf_counter())
        return len(self._times) - 1

    def seconds(self) -> list[float]:
        """Returns the time of each mark since the first one."""
        if self._events:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [time - self._times[0] for time in self._times]

    def between(self, seconds: Sequence[float], times: Sequence[float]) -> Iterator[float]:
        """Yields `times` of the host's clock, which are in order, as times of the step, with marks at `seconds`."""
        at, last = 0, len(self._times) - 1
        for time in times:
            while at < last - 1 and self._times[at + 1] <= time:
                at += 1
            end = min(at + 1, last)
            width = self._times[end] - self._times[at]
            share = min(1.0, max(0.0, (time - self._times[at]) / width)) if width else 1.0
            yield seconds[at] + share * (seconds[end] - seconds[at])


# The storages of tensors while a step runs: their bytes from first use to death, and their purpose


_GATHERING = (MemoryKind.ROWS.value, MemoryKind.SENT.value)

Call = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]


@dataclass(eq=False, slots=True)
class Followed:
    """A storage.

    `kind` and `unit` are its purpose before the engine holds it, `holder` is its last purpose in the engine. `first` is
    the number of the note with which its present bytes came.
    """

    kind: str
    unit: int
    nbytes: int = 0
    address: int = 0
    holder: tuple[str, int] | None = None
    first: int = 0
    is_seen: bool = False
    """An operation touched the storage, so its death will be noticed."""


@dataclass(slots=True)
class Note:
    """Bytes that come, or go if below 0, at a time of the host's clock.

    `purpose` is None for the storage's own purpose, which may change later: a tensor of forward is an activation if it
    is alive when backward begins.
    """

    time: float
    moment: Moment | str | None
    storage: Followed
    purpose: tuple[str, int] | None
    nbytes: int

    @property
    def kind_and_unit(self) -> tuple[str, int]:
        """The purpose of the bytes, as it is known by now."""
        return self.purpose or (self.storage.kind, self.storage.unit)


class Storages(TorchDispatchMode):
    """Follows every storage that an operation reads or makes, as long as the mode is on.

    Args:
        device: the type of device whose memory counts.
        at_pass: is called with "backward" before the first operation of a backward, with "recompute" when forward runs
            again within it, and with "backward" when that ends.
        at_call: runs each collective. It gets the operation, its arguments, and a function that calls it with them.
        after_each: is called after each operation, with the bytes that are alive then. If it raises, the operation
            raises.
    """

    def __init__(
        self,
        device: str,
        at_pass: Callable[[str], None],
        at_call: Call,
        after_each: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self.before: list[Note] = []
        """Notes of the storages that were there when the mode began."""
        self._now = 0
        self._device, self._at_pass, self._at_call, self._after_each = device, at_pass, at_call, after_each
        self._thread = threading.get_ident()
        self._of: dict[int, Followed] = {}
        self._at: dict[int, Followed] = {}
        self._recomputed: list[Followed] = []
        self._held_at: dict[int, Set[int]] = {}
        self._in_backward = self._again = False
        self._logits: tuple[int, int] | None = None
        """The width and the bytes of the logits."""
        self.expect(TensorKind.TEMPORARY.value, -1, None)

    @contextmanager
    def following(self) -> Iterator[None]:
        try:
            with _resizes_told(self._resized), self:
                yield
        finally:
            self._of.clear()  # later deaths do not count
            self._at.clear()

    def forget(self) -> None:
        """Forget all changes. The present storages were there before."""
        alive = {id(each): each for each in (*self._of.values(), *self._at.values()) if each.nbytes}
        self.notes, self.before, self._now, self._since = [], [], 0, 0
        self._recomputed.clear()
        for each in alive.values():
            self._was_there(each)

    def held_now(self) -> Counter[tuple[str, int]]:
        """Returns the bytes that are alive, by kind and unit."""
        held: Counter[tuple[str, int]] = Counter()
        for note in (*self.before, *self.notes):
            held[note.kind_and_unit] += note.nbytes
        return +held

    def expect(self, kind: str, unit: int, moment: Moment | str | None) -> None:
        """Take bytes that come from now on as of this kind and unit, unless they turn out to be of another."""
        self._kind, self._unit, self._moment = kind, unit, moment
        self._since = len(self.notes)

    @property
    def expected(self) -> tuple[str, int, Moment | str | None]:
        return self._kind, self._unit, self._moment

    def hold(self, unit: int, held: Held) -> None:
        """Note the storages that the engine or an optimizer holds for `unit`.

        Bytes since the last `expect` came for this purpose. Rows that are alive and no longer held are the transport's:
        its thread drops them a moment later.
        """
        for address in self._held_at.get(unit, ()) - held.keys():
            dropped = self._at.get(address)
            if dropped is not None and dropped.nbytes and dropped.holder and dropped.holder[0] in _GATHERING:
                self._hand_over(dropped, (MemoryKind.TRANSPORT.value, unit))
        self._held_at[unit] = held.keys()
        for address, (kind, nbytes) in held.items():
            storage, purpose = self._at.get(address), (kind.value, unit)
            if storage is None:
                storage = Followed(*purpose, nbytes, address, purpose)
                self._at[address] = storage
                self._was_there(storage)
            elif storage.holder != purpose:
                if storage.first >= self._since:
                    for note in self.notes[storage.first :]:
                        if note.storage is storage:
                            note.purpose = purpose
                    storage.holder = purpose
                else:
                    self._hand_over(storage, purpose)

    def _hand_over(self, storage: Followed, purpose: tuple[str, int]) -> None:
        if storage.nbytes:
            self._note(storage, -storage.nbytes)
        storage.holder = purpose
        if storage.nbytes:
            self._note(storage, storage.nbytes)

    def expect_logits(self, logits: torch.Tensor | None) -> None:
        """Take `logits`, and later tensors like them, as logits. None: no more."""
        self._logits = None
        if logits is not None:
            self._logits = logits.shape[-1], logits.nbytes
            storage = self._of.get(logits.untyped_storage()._cdata)
            if storage is not None:
                storage.kind = TensorKind.LOGITS.value

    def become(self, kind: TensorKind) -> None:
        """Let all temporaries that are alive be of `kind`, from the start."""
        for storage in list(self._of.values()):
            if storage.kind == TensorKind.TEMPORARY.value:
                storage.kind = kind.value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own dispatch runs on local tensors, which come back here
        kwargs = kwargs or {}
        again = self._follow_passes()
        given = (args, kwargs.values())
        # `torch.tensor` makes a storage before its operation is seen, and so does a collective, deep in C++.
        is_new = (
            self._in_backward or self._kind == MemoryKind.TRANSPORT.value or func is torch.ops.aten.lift_fresh.default
        )
        for each in _dense_among(given):
            self._see(each.untyped_storage(), is_new, again)
        call = partial(func, *args, **kwargs)
        result = self._at_call(func, args, call) if is_communication(func) else call()
        for each in _dense_among((*given, result)):  # `resize_` changes a storage and makes none
            self._see(each.untyped_storage(), True, again, each.shape[-1] if each.dim() else 0)
        if self._after_each is not None:
            self._after_each(self._now)
        return result

    def _follow_passes(self) -> bool:
        """Notice that backward begins. Returns True if forward runs again within it."""
        within = in_backward()
        begins = within and not self._in_backward
        if begins:
            self.become(TensorKind.ACTIVATION)
        self._in_backward = within
        again = within and torch.is_grad_enabled()
        # All-gathers, which run without gradients, belong to either pass.
        if begins or (within and again != self._again and self._kind != MemoryKind.TRANSPORT.value):
            self._at_pass("recompute" if again else "backward")
            self._again = again
        self._again = self._again and within
        if not again and self._recomputed:
            alive = set(map(id, self._of.values()))
            for each in self._recomputed:
                if id(each) in alive and each.kind == TensorKind.TEMPORARY.value:
                    each.kind = TensorKind.ACTIVATION.value
            self._recomputed.clear()
        return again

    def _see(self, storage: torch.UntypedStorage, is_new: bool, again: bool = False, width: int = 0) -> None:
        """Note the bytes of `storage` if they changed. An unknown storage that is not `is_new` was there before."""
        if storage.device.type != self._device or not storage.resizable():
            return  # the memory belongs to another storage, which is counted
        key, nbytes = storage._cdata, storage.nbytes()
        found = self._of.get(key)
        if found is None:
            found = self._at.get(storage.data_ptr()) if nbytes else None
            if found is None or found.is_seen:
                found = Followed(self._kind, self._unit)
                if not is_new:
                    found = Followed(TensorKind.INPUT.value, -1, nbytes)
                    self._was_there(found)
                elif self._logits is not None and is_as_logits(width, nbytes, *self._logits):
                    found.kind = TensorKind.LOGITS.value
                elif again:
                    self._recomputed.append(found)
            found.is_seen = True
            self._of[key] = found
            weakref.finalize(storage, self._died, key).atexit = False
        if nbytes != found.nbytes:
            if not found.nbytes:
                found.first = len(self.notes)
            self._note(found, nbytes - found.nbytes)
            found.nbytes = nbytes
        address = storage.data_ptr()
        if address != found.address:
            self._at.pop(found.address, None)
        if address:
            self._at[address] = found
        found.address = address

    def _resized(self, storage: torch.UntypedStorage) -> None:
        # Ranks may be threads; backward on an accelerator has threads of its own.
        if self._device != "cpu" or threading.get_ident() == self._thread:
            self._see(storage, True)
            if self._after_each is not None:
                self._after_each(self._now)

    def _died(self, key: int) -> None:
        storage = self._of.pop(key, None)
        if storage is not None:
            if self._at.get(storage.address) is storage:
                del self._at[storage.address]
            if storage.nbytes:
                self._note(storage, -storage.nbytes)

    def _was_there(self, storage: Followed) -> None:
        storage.first = -1
        self._now += storage.nbytes
        self.before.append(Note(0.0, None, storage, storage.holder, storage.nbytes))

    def _note(self, storage: Followed, nbytes: int) -> None:
        self._now += nbytes
        self.notes.append(Note(perf_counter(), self._moment, storage, storage.holder, nbytes))


def _dense_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in tensors_among(values):
        if each.layout is torch.strided and not hasattr(each, "__tensor_flatten__"):  # others consist of tensors
            yield each


_listeners: list[Callable[[torch.UntypedStorage], None]] = []
_lock = threading.Lock()


@contextmanager
def _resizes_told(listener: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell `listener` of each storage that is resized, which is no operation of the dispatcher."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            _tell_of_resizes()
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                torch.UntypedStorage.resize_ = torch.UntypedStorage.resize_.plain  # type: ignore


def _tell_of_resizes() -> None:
    plain: Any = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        for listener in list(_listeners):
            listener(storage)
        return result

    resize_and_tell.plain = plain  # type: ignore[attr-defined]
    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore
