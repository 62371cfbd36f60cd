"""`memory_report` and `track_memory`: what sherd's buffers take, by unit and kind, now and at the peak of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from sherd.engine import Unit
from sherd.errors import ModuleError
from sherd.memory.held import bytes_of, held_by, held_by_optimizer, staging_bytes, total
from sherd.memory.predict import forecast_for
from sherd.memory.watch import Watch, last_peak, watched
from sherd.requirements import require_int
from sherd.schedule.forecast import Forecast
from sherd.schedule.moments import MemoryKind, in_words

BESIDE_UNITS = "(all units)"
"""The unit of rows that belong to none: memory shared with other ranks, state of parameters that are no unit's."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind in one unit: allocated `now`, and `at_peak`, at the predicted peak of a step."""

    unit: str
    kind: str
    now: int
    at_peak: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of sherd's buffers on this rank's device. `print` it for a table.

    It counts shards, unsharded parameters, gradients and everything in between, but not what rests in the memory of the
    host while compute is on an accelerator (`CPUOffloadPolicy`). It does not count the module's own buffers, nor what
    autograd holds by itself: activations, and the gradient of a tied parameter until it is complete.

    Attributes:
        rows: bytes by unit and kind, units in the order of `named_modules`; no row where both figures are 0.
        predicted_peak: the most bytes at once in a training step whose order is learnt, by the schedule.
        predicted_moment: the moment of that peak, in words.
        measured_peak: the most bytes at once that `track_memory` saw last in this model, None if it saw none.
        measured_moment: the moment of that peak, in words.
    """

    rows: tuple[MemoryRow, ...]
    predicted_peak: int
    predicted_moment: str
    measured_peak: int | None = None
    measured_moment: str | None = None

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
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: Optimizer | None = None, *, unsynced_batches: int = 0) -> MemoryReport:
    """Returns the memory of sherd's buffers on this rank, by unit and kind: now, and at the predicted peak of a step.

    The prediction asks the schedule that runs the model. Until a step was run under `track_memory`, the order in which
    gradients arrive is a guess on the safe side. A step is forward, backward and optimizer step, with gradients set to
    None; the optimizer's own temporaries are not in it.

    On a model that has not run yet all ranks must call it together, since it sets up transports, which is collective.

    Args:
        model: what `fully_shard` was called on last, the root of the units; it may be on the meta device.
        optimizer: also count its state, as it is now.
        unsynced_batches: predict a step with so many backwards before the last one whose gradients are not reduced
            (`set_requires_gradient_sync(False)`).

    Raises:
        ModuleError: `model` is not a sharded module.
        PolicyError: `unsynced_batches` is negative.
    """
    unit = root_unit(model, "memory_report")
    require_int("memory_report(unsynced_batches={})", unsynced_batches, 0)
    units = Unit.below(model)
    assert units[0] is unit, "the root comes first"
    names = names_of(model, units)
    predicted, measured = forecast_for(model, units, unsynced_batches), last_peak(units)
    lasting = _lasting(units, optimizer)
    always = lasting.total()
    return MemoryReport(
        _rows(units, names, predicted, lasting),
        predicted.peak + always,
        in_words(predicted.moment, names),
        None if measured is None else measured.peak + always,
        None if measured is None else in_words(measured.moment, names),
    )


class MemoryPeak:
    """The peak that `track_memory` has seen so far. It can still be read after the `with` block."""

    def __init__(self, watch: Watch, names: Sequence[str]) -> None:
        self._watch = watch
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
    """Look at the buffers of `model`'s units after everything that happens to them inside the `with` block.

        with sherd.track_memory(model) as peak:
            model(batch).sum().backward()
        print(peak)

    From the last whole step in it `memory_report` knows in which order gradients arrive, and predicts exactly. Watch
    the second step or a later one, for in its first backward a unit keeps large tensors for longer. Outside of the
    block nothing is slower.

    Args:
        model: what `fully_shard` was called on last, the root of the units, with data: a model on the meta device is
            refused.

    Raises:
        ModuleError: `model` is not a sharded module.
        StateError: its parameters have no data yet, or it is tracked already.
    """
    unit = root_unit(model, "track_memory")
    with watched(model, unit) as watch:
        yield MemoryPeak(watch, names_of(model, watch.units))


def root_unit(model: nn.Module, asked: str) -> Unit:
    unit = Unit.of(model) if isinstance(model, nn.Module) else None
    if unit is None:
        raise ModuleError(
            f"{asked} expects a module that fully_shard was called on, got a {type(model).__name__}; pass the root, "
            "the one that was sharded last"
        )
    return unit


def names_of(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Returns the units' names: those of their modules, as seen from `model`."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        unit = Unit.of(module)
        if unit is not None:
            names.setdefault(unit.id, []).append(name or unit.class_name)
    return [", ".join(names.get(unit.id, [unit.name])) for unit in units]


# Rows

Bytes = Counter[tuple[int | None, MemoryKind]]
"""By a unit's index, or None for what is no unit's, and kind."""


def _lasting(units: Sequence[Unit], optimizer: Optimizer | None) -> Bytes:
    """Returns the bytes that stay allocated all through a step."""
    numbers: dict[int | None, int] = {unit.id: number for number, unit in enumerate(units)}
    lasting: Bytes = Counter({(None, MemoryKind.TRANSPORT): staging_bytes(units)})
    if optimizer is not None:
        for owner, held in held_by_optimizer(optimizer.state, units[0].mesh.device).items():
            lasting[numbers.get(owner), MemoryKind.OPTIMIZER] += total(held)
    return lasting


def _rows(units: Sequence[Unit], names: Sequence[str], peak: Forecast, lasting: Bytes) -> tuple[MemoryRow, ...]:
    held = {(number, kind): its for number, unit in enumerate(units) for kind, its in bytes_of(held_by(unit)).items()}
    now, at_peak = lasting + Counter(held), lasting + Counter(peak.parts)
    named = [*enumerate(names), (None, BESIDE_UNITS)]
    rows = (MemoryRow(name, kind.value, now[at, kind], at_peak[at, kind]) for at, name in named for kind in MemoryKind)
    return tuple(row for row in rows if row.now or row.at_peak)


def _in_mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:,.{1 if mib >= 10 else 3}f}"


def _table(parts: dict[tuple[str, str], int]) -> list[str]:
    """Returns the lines of a table in MiB, a row for each unit and a column for each kind. Units that follow one
    another and have equal figures share a row."""
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
