"""`memory_report` and `track_memory`: what sherd's buffers take, by unit and kind, now and at the peak of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import nn
from torch.optim import Optimizer

from sherd.engine import Group, Runtime, Unit, sizes_of, watcher
from sherd.errors import ModuleError
from sherd.memory import watch
from sherd.policy import Disk
from sherd.requirements import require_int
from sherd.schedule.actions import AfterForward, BeforeForward
from sherd.schedule.forecast import Forecast, forecast
from sherd.schedule.moments import CHUNK_NUMEL, IN_FLIGHT, Arrival, MemoryKind, Moment, in_words, step_of
from sherd.schedule.state import State
from sherd.tensor.optimizers import is_elementwise_class

JOINED = 10
"""The bytes of an element's master while it is stepped: as float32, and its parts while it is split."""

BESIDE_UNITS = "(all units)"
"""The unit of rows that belong to no unit: memory shared with other ranks, state of parameters outside of units."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind in one unit: `now`, and `at_peak`, the predicted peak of a step."""

    unit: str
    kind: str
    now: int
    at_peak: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of sherd's buffers on this rank's device. `print` it for a table.

    It counts shards, unsharded parameters, gradients and everything in between. What rests elsewhere while an
    accelerator computes (`OffloadPolicy`) is in `host` and `disk`. It does not count the module's own buffers, nor the
    tensors of autograd: activations, and the gradient of a tied parameter until it is complete.

    Attributes:
        rows: bytes by unit and kind, units in the order of `named_modules`; no row where both figures are 0.
        predicted_peak: the most bytes at once in a training step whose order is learnt, by the schedule.
        predicted_moment: the moment of that peak, in words.
        measured_peak: the most bytes at once that the last `track_memory` saw in this model. None: it was not used.
        measured_moment: the moment of that peak, in words.
        host: the bytes in host memory: `at_peak` with the gradients of a step, and what units have saved there for
            backward so far. Allocators of pinned memory may round them up, torch's to powers of two.
        disk: the bytes on disks.
    """

    rows: tuple[MemoryRow, ...]
    predicted_peak: int
    predicted_moment: str
    measured_peak: int | None = None
    measured_moment: str | None = None
    host: tuple[MemoryRow, ...] = ()
    disk: tuple[MemoryRow, ...] = ()

    @property
    def now(self) -> int:
        """Bytes allocated now, in all."""
        return sum(row.now for row in self.rows)

    def __str__(self) -> str:
        now = {(row.unit, row.kind): row.now for row in self.rows}
        peak = {(row.unit, row.kind): row.at_peak for row in self.rows}
        lines = [f"now: {_in_mib(self.now)} MiB", *_table(now), ""]
        lines += [f"predicted peak of a step: {_in_mib(self.predicted_peak)} MiB, {self.predicted_moment}"]
        lines += _table(peak)
        if self.measured_peak is not None:
            lines += ["", f"measured peak: {_in_mib(self.measured_peak)} MiB, {self.measured_moment}"]
        for where, rows in (("in host memory", self.host), ("on disks", self.disk)):
            if rows:
                at_rest = {(row.unit, row.kind): row.now for row in rows}
                lines += ["", f"{where}: {_in_mib(sum(row.now for row in rows))} MiB", *_table(at_rest)]
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: Optimizer | None = None, *, unsynced_batches: int = 0) -> MemoryReport:
    """Returns the memory of sherd's buffers on this rank, by unit and kind: now, and at the predicted peak of a step.

    The prediction asks the schedule that runs the model. Until a step runs under `track_memory`, the order in which
    gradients arrive is a guess on the safe side. A step is forward, backward and optimizer step, with gradients set to
    None; it does not include the optimizer's own temporaries.

    Before the model's first step all ranks must call it together, since it sets up transports, which is collective.

    Args:
        model: the root of the units, on which `fully_shard` was called last; it may be on the meta device.
        optimizer: also count its state, as it is now, and the chunks of what comes for its step from elsewhere.
        unsynced_batches: predict a step with this many backwards before the last one that do not reduce their gradients
            (`set_requires_gradient_sync(False)`).

    Returns:
        Rows by unit and kind, the predicted peak, and the peak that `track_memory` measured last.

    Raises:
        ModuleError: `model` is not a sharded module.
        PolicyError: `unsynced_batches` is negative.
    """
    unit = root_unit(model, "memory_report")
    require_int("memory_report(unsynced_batches={})", unsynced_batches, 0)
    units = Unit.below(model)
    assert units[0] is unit, "the root comes first"
    names = names_of(model, units)
    predicted = forecast_for(model, units, unsynced_batches, _in_flight(units, optimizer))
    measured = watch.last_peak(units)
    device, cpu = unit.mesh.device, torch.device("cpu")
    lasting, on_disk = _lasting(units, optimizer, device)
    lasting[None, MemoryKind.TRANSPORT] += watch.staging_bytes(units)
    always = lasting.total()
    host: tuple[MemoryRow, ...] = ()
    if device.type != "cpu":
        on_host, on_disk = _lasting(units, optimizer, cpu)
        if any(each.backward.offload is not None for each in units):  # the memory is the process's, for all models
            on_host[None, MemoryKind.SAVED] += Unit.saved_bytes(device)
        present = _present(units, cpu)
        host = _rows(names, present, present | _stored_gradients(units), on_host)
    return MemoryReport(
        _rows(names, _present(units, device), predicted.parts, lasting),
        predicted.peak + always,
        in_words(predicted.moment, names),
        None if measured is None else measured.peak + always,
        None if measured is None else in_words(measured.moment, names),
        host,
        _rows(names, {}, {}, on_disk),
    )


class MemoryPeak:
    """The peak that `track_memory` measures. It can still be read after the `with` block."""

    def __init__(self, seen: watch.Watch, names: Sequence[str]) -> None:
        self._watch = seen
        self._names = tuple(names)

    @property
    def nbytes(self) -> int:
        """The most bytes of buffers allocated at once, in all units."""
        return self._watch.peak.peak

    @property
    def moment(self) -> str:
        """The moment of the peak, in words."""
        return in_words(self._watch.peak.moment, self._names)

    @property
    def rows(self) -> dict[tuple[str, str], int]:
        """The peak's bytes by unit and kind."""
        return {(self._names[unit], kind.value): nbytes for (unit, kind), nbytes in self._watch.peak.parts.items()}

    def __str__(self) -> str:
        return "\n".join([f"measured peak: {_in_mib(self.nbytes)} MiB, {self.moment}", *_table(self.rows)])


@contextmanager
def track_memory(model: nn.Module) -> Iterator[MemoryPeak]:
    """Measure the buffers of `model`'s units after every event and action inside the `with` block.

        with sherd.track_memory(model) as peak:
            model(batch).sum().backward()
        print(peak)

    From the last complete step in the block `memory_report` knows the order in which gradients arrive, and predicts
    exactly. Watch the second step or a later one, since a unit keeps large tensors for longer in its first backward.
    Outside of the block nothing is slower.

    Args:
        model: the root of the units, on which `fully_shard` was called last. It must have data: a model on the meta
            device is refused.

    Yields:
        The peak so far.

    Raises:
        ModuleError: `model` is not a sharded module.
        StateError: its parameters have no data yet, or it is tracked already.
    """
    unit = root_unit(model, "track_memory")
    with watch.watched(model, unit) as seen:
        yield MemoryPeak(seen, names_of(model, seen.units))


def root_unit(model: nn.Module, caller: str) -> Unit:
    """Returns the unit of `model`. Raises ModuleError, in which `caller` names the function, if it has none."""
    unit = Unit.of(model) if isinstance(model, nn.Module) else None
    if unit is None:
        raise ModuleError(
            f"{caller} expects a module that fully_shard was called on, got a {type(model).__name__}; pass the root, "
            "the one that was sharded last"
        )
    return unit


def names_of(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Returns the units' names: the names of their modules in `model`."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        unit = Unit.of(module)
        if unit is not None:
            names.setdefault(unit.id, []).append(name or unit.class_name)
    return [", ".join(names.get(unit.id, [unit.name])) for unit in units]


# Rows

Bytes = Counter[tuple[int | None, MemoryKind]]
"""Bytes by kind and the number of a unit, None for memory outside of units."""


def _lasting(units: Sequence[Unit], optimizer: Optimizer | None, device: torch.device) -> tuple[Bytes, Bytes]:
    """Returns the bytes of optimizer state and masters on `device`, which stay allocated throughout a step.

    And, for the host, those of them that are maps of files on disks, with shards that are.
    """
    numbers: dict[int | None, int] = {unit.id: number for number, unit in enumerate(units)}
    lasting, on_disk = Bytes(), Bytes()
    if optimizer is not None:
        for owner, held in watch.held_by_optimizer(optimizer.state, device).items():
            lasting[numbers.get(owner), MemoryKind.OPTIMIZER] += watch.total(held)
    for number, unit in enumerate(units):
        masters = [each for weights in unit.weights if (each := weights.group.masters) is not None]
        bits = [(MemoryKind.MASTERS, part) for each in masters for part in (each.low, each.carries)]
        lasting[number, MemoryKind.MASTERS] += watch.total(watch.alive(bits, device))
        for kind, place in ((MemoryKind.OPTIMIZER, unit.place.state), (MemoryKind.MASTERS, unit.place.masters)):
            if isinstance(place, Disk) and device.type == "cpu":
                on_disk[number, kind] = lasting.pop((number, kind), 0)
        if unit.place.disk is not None:
            on_disk[number, MemoryKind.SHARDS] = sum(weights.group.shard_bytes for weights in unit.weights)
    return lasting, on_disk


def _present(units: Sequence[Unit], device: torch.device) -> dict[tuple[int, MemoryKind], int]:
    return {
        (number, kind): nbytes
        for number, unit in enumerate(units)
        for kind, nbytes in watch.bytes_of(watch.held_by(unit, device)).items()
    }


def _stored_gradients(units: Sequence[Unit]) -> dict[tuple[int, MemoryKind], int]:
    """Returns the bytes of gradients in host memory at the end of a backward."""
    sizes = (sum(each.gradients for each in sizes_of(unit) if each.is_offloaded and each.arriving) for unit in units)
    return {(number, MemoryKind.GRADIENTS): nbytes for number, nbytes in enumerate(sizes)}


def _rows(
    names: Sequence[str],
    present: Mapping[tuple[int, MemoryKind], int],
    peak: Mapping[tuple[int, MemoryKind], int],
    lasting: Bytes,
) -> tuple[MemoryRow, ...]:
    now, at_peak = lasting + Counter(present), lasting + Counter(peak)
    named = [*enumerate(names), (None, BESIDE_UNITS)]
    rows = (MemoryRow(name, kind.value, now[at, kind], at_peak[at, kind]) for at, name in named for kind in MemoryKind)
    return tuple(row for row in rows if row.now or row.at_peak)


def _in_mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:,.{1 if mib >= 10 else 3}f}"


def _table(parts: dict[tuple[str, str], int]) -> list[str]:
    """Returns the lines of a table in MiB, by unit and kind. Neighbouring units with equal figures share a row."""
    kinds = [kind.value for kind in MemoryKind if any(parts.get((unit, kind.value)) for unit, _ in parts)]
    units = list(dict.fromkeys(unit for (unit, _), nbytes in parts.items() if nbytes))
    folded: list[tuple[str, int, list[int]]] = []
    for unit in units:
        figures = [parts.get((unit, kind), 0) for kind in kinds]
        if folded and folded[-1][2] == figures:
            first, more, _ = folded[-1]
            folded[-1] = first, more + 1, figures
        else:
            folded.append((unit, 0, figures))
    lines = [["unit", *kinds, "sum"]]
    for unit, more, figures in folded:
        name = f"{unit} and {more} more, each" if more else unit
        lines.append([name, *(_in_mib(each) if each else "" for each in figures), _in_mib(sum(figures))])
    sums = [sum(parts.get((unit, kind), 0) for unit in units) for kind in kinds]
    lines.append(["all", *map(_in_mib, sums), _in_mib(sum(sums))])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]


# The prediction


def forecast_for(
    root: nn.Module, units: Sequence[Unit], unsynced: int = 0, in_flight: Sequence[tuple[int, int]] = ()
) -> Forecast:
    """Returns the predicted peak of a training step of `root`. Units are numbered as in `units`.

    It replays the last step that was watched. Without one, it makes up a step, from the order in which units ran or
    else were registered.
    """
    state = state_for(root, units)
    sizes = [sizes_of(unit) for unit in units]
    runtime = watch.sealed_runtime(units)
    step = None if runtime is None else watch.last_steps.get(runtime)
    if step is None:
        step = step_of(_guess(root, units, runtime), sizes)
    batch_bytes = batch_bytes_of(units)
    return forecast(
        state.specs, state.limits, sizes, step, batch_bytes=batch_bytes, unsynced=unsynced, in_flight=in_flight
    )


def _in_flight(units: Sequence[Unit], optimizer: Optimizer | None) -> list[tuple[int, int]]:
    """Returns the bytes of chunks that come for the step of `optimizer`, with their units, while they are the most.

    Of the chunk that is stepped the masters are there as float32, and as what they are split into.
    """
    chunks: list[list[tuple[int, int]]] = []
    if optimizer is None:
        return []
    for number, group in ((number, weights.group) for number, unit in enumerate(units) for weights in unit.weights):
        if group.is_brought and not group.is_offloaded:
            bits, state = _bits_that_come(group), _state_that_comes(group, optimizer)
            for start in range(0, group.shard_numel, CHUNK_NUMEL):
                numel = min(CHUNK_NUMEL, group.shard_numel - start)
                joined = 0 if group.masters is None else JOINED * numel
                chunks.append([(number, state * numel + -(-bits * numel // 8)), (number, joined)])
    is_in_chunks = is_elementwise_class(getattr(optimizer, "_sherd_kind", type(optimizer)))
    width = IN_FLIGHT if is_in_chunks else len(chunks)
    windows = [chunks[start : start + width] for start in range(max(1, len(chunks) - width + 1))]
    alive = [
        [near for near, _ in window] + sorted((joined for _, joined in window), key=itemgetter(1))[-1:]
        for window in windows
    ]
    return max(alive, key=lambda parts: sum(nbytes for _, nbytes in parts))


def _bits_that_come(group: Group) -> int:
    """Returns the bits of an element's master that do not rest where the optimizer steps."""
    is_far = group.masters is not None and (
        isinstance(group.place.masters, Disk) or group.masters.low.device != group.shard_buffer.device
    )
    return 17 if is_far else 0


def _state_that_comes(group: Group, optimizer: Optimizer) -> int:
    """Returns the bytes of an element's state that come, as it is, or will be after the first step."""
    parameters = [each.parameter for each in group.optimizer_params] if group.place.brings_state else []
    for values in (optimizer.state[each].values() for each in parameters if each in optimizer.state):
        return sum(each.dtype.itemsize for each in values if isinstance(each, torch.Tensor) and each.ndim)
    itemsize = group.dtype.itemsize if group.masters is None else torch.float32.itemsize
    return watcher.num_moments(optimizer) * itemsize * bool(parameters)


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
    """Returns the calls in the learnt order, or none if that was not one complete forward of the root."""
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
