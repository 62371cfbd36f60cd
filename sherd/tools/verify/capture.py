"""`capturable`: whether a training step may be captured as a graph, and what keeps it from that, by unit and line."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sherd._torch import frames_from, is_users, local_tensor
from sherd.comm import streams
from sherd.comm.agreement import gathered_along
from sherd.comm.streams import streams_for
from sherd.engine import Runtime, Unit
from sherd.errors import CommError, StateError, reason_of
from sherd.memory.report import names_of, root_unit
from sherd.memory.watch import held_by, held_by_optimizer, total
from sherd.requirements import require_int
from sherd.schedule.actions import Action, BeforeBackward, EndBackward, Event
from sherd.schedule.moments import MemoryKind

__all__ = ["CaptureProblem", "CaptureReport", "capturable"]

REMEDIES = {
    "host sync": "read values after the step, from tensors that it leaves: loss.detach(), the norm of clip_grad_norm_",
    "outside event": "leave set_post_optim_event out, and wait for all that the step starts before it ends",
    "allocation": "keep no tensors of a step, such as a list of losses; copy into tensors that stay",
    "address": "make what lasts before the step and write into it in place; or drop it inside the step, as zero_grad()",
    "schedule": "run the same units and give gradients to the same parameters in each step, or warm up for longer",
    "host value": "keep on the device what changes: AdamW(capturable=True), and a tensor as its lr",
    "capture": "make the model's first steps inside of `with torch.cuda.stream(...)`, as its capture; else compare "
    "what the step reads from Python, and from memory that is not its own",
}
"""By kind of problem, in the order of the report: what to do."""
OFFLOADED = "CPUOffloadPolicy steps in host memory, for which the host waits: leave it out"
COMPARED = "ranks compare what replicas hold, now and then: capture the next step, or CommPolicy(divergence='trust')"
NUM_COMPARED = 2
"""Steps in which replays are compared with the eager steps."""
TOLERANCE = 0.02
"""The largest difference between them, as a share of the change that the steps make."""


@dataclass(frozen=True)
class CaptureProblem:
    """Something that a graph of the step would not hold, or would repeat where the step changes it.

    Attributes:
        kind: "host sync", "outside event", "allocation", "address", "schedule", "host value" or "capture".
        unit: the unit at work, or "" outside of units.
        what: the problem, in words.
        where: "file:line" of the user's or of sherd's code; "" where none was running.
        ranks: the ranks that found it.
    """

    kind: str
    unit: str
    what: str
    where: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        unit, where = self.unit and f" in unit {self.unit}", self.where and f", at {self.where}"
        return f"{self.kind}{unit}: {self.what}{where} ({_on(self.ranks)})"


@dataclass(frozen=True)
class CaptureReport:
    """The findings of `capturable`, the same on every rank. True if there is no problem; `str()` has a line for each.

    Attributes:
        problems: all that was found, sorted by kind.
        moved: units whose unsharded parameters were at other addresses in the second step. A graph of the entire step
            has memory of its own, so that is no problem there; a graph of a part of the model needs
            `set_keep_unsharded_storage(True)`.
        device: the type of the device. On a "cpu" there are no streams, and waits of the host are not seen.
        is_replayed: the step was captured, and its replays gave the values of the eager steps.
    """

    problems: tuple[CaptureProblem, ...]
    moved: tuple[str, ...]
    device: str
    is_replayed: bool = False

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        kinds = dict.fromkeys(each.kind for each in self.problems)
        lines = [*map(str, self.problems), *(f"for each {kind}: {REMEDIES[kind]}" for kind in kinds)]
        if not lines:
            proof = (
                "captured, and replays give the eager values" if self.is_replayed else f"as watched on {self.device}"
            )
            lines = [f"the step may be captured: {proof}"]
        if self.moved:
            units = f"{self.moved[0]} and {len(self.moved) - 1} more" if self.moved[1:] else self.moved[0]
            lines += [f"note: unsharded parameters move between steps ({units}); see CaptureReport.moved"]
        if self.device == "cpu":
            lines += ["note: a CPU shows no waits of the host, events and memory; ask again on an accelerator"]
        return "\n".join(lines)


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def capturable(model: nn.Module, step: Callable[[], object], *, warmup: int = 5) -> CaptureReport:
    """Watch two steps of a training, and report what keeps a step from being captured as a graph and replayed.

    A graph repeats the work of one step on the device, without Python. So in the step the host must not wait for the
    device; no stream may wait for an event from outside of the step; memory that is alive between steps must stay where
    it is; nothing that a step makes may be kept; units, gradients and numbers must be those of the step before.

        x, y = next(batches)                      # copy later batches into these
        report = sherd.capturable(model, one_step)
        print(report)

    The steps are real: they train the model. On CUDA, if nothing was found, a step is also captured
    (`torch.cuda.graph`), and its replays are compared with eager steps; after that the model, its buffers and its
    optimizers are as before.

    All ranks must call this function, and all get the same report.

    Args:
        model: the root of the units, sharded by either front end.
        step: makes one step, on inputs that stay where they are: forward, backward, clipping, the optimizer.
        warmup: the number of steps before those that are watched, at least 1. Optimizers make their state in the
            first, and the order of units is learnt. Ranks compare the values of replicas after steps 1, 2, 4, 8 and
            so on of an optimizer, for which the host waits: of a new model, steps 6 and 7 are without that.

    Returns:
        The problems of all ranks, by unit and line.

    Raises:
        ModuleError: `model` is not a sharded module.
        PolicyError: `warmup` is less than 1.
        StateError: the step raised on some rank, or the model is watched already.
    """
    unit = root_unit(model, "capturable")
    require_int("capturable(warmup={})", warmup, 1)
    if not callable(step):
        raise StateError(f"capturable expects a function that makes one step, got a {type(step).__name__}")
    device = unit.mesh.device
    watch = _Watch(model, Runtime.of(unit, model), device)
    with streams.aside(device):
        with watch.seeing():
            for number in range(warmup + 2):
                # After each step: a rank that goes on would wait in the next one for a rank whose step has raised.
                _agreed(unit, partial(watch.make, step, number >= warmup))
        found, moved = _agreed(unit, watch.compare)
        report = CaptureReport(found, moved, device.type)
        if report and device.type == "cuda":
            trial = _Trial(model, step, watch.optimizers.values(), device)
            # Only if all ranks have captured: the replay of one would wait for the others.
            found, _ = _agreed(unit, trial.capture)
            found = found or _agreed(unit, trial.replay)[0]
            trial.restore()
            report = replace(report, problems=found, is_replayed=not found)
    return report


Found = tuple[list[CaptureProblem], list[str]]


def _agreed(unit: Unit, look: Callable[[], Found]) -> tuple[tuple[CaptureProblem, ...], tuple[str, ...]]:
    """Returns what all ranks have found. Raises StateError on all ranks if the step raised on one."""
    failure: Exception | None = None
    found: Found = [], []
    try:
        found = look()
    except Exception as error:
        failure = error
    why = None if failure is None else f"{type(failure).__name__}: {reason_of(failure)}"
    mesh = unit.mesh.mesh
    mine = torch.distributed.get_rank(), why, found
    told: list[tuple[int, str | None, Found]] = [mine]
    try:
        told = gathered_along(map(mesh.get_group, range(mesh.ndim)), mine, "what capturable has found")
    except CommError:
        if failure is None:
            raise
        # The other ranks are still in the step, and have been told by the guard.
    raised = [f"{why} (rank {rank})" for rank, why, _ in told if why]
    if raised:
        raise StateError(f"capturable: the step raised {raised[0]}") from failure
    ranks: dict[CaptureProblem, list[int]] = {}
    for rank, _, (problems, _) in told:
        for each in problems:
            ranks.setdefault(each, []).append(rank)
    kinds = list(REMEDIES)
    problems = sorted((replace(each, ranks=tuple(of)) for each, of in ranks.items()), key=lambda p: kinds.index(p.kind))
    return tuple(problems), tuple(dict.fromkeys(name for _, _, (_, moved) in told for name in moved))


# The watch


@dataclass
class _Step:
    """The record of one step: its events, and the memory that is alive at its end."""

    schedule: list[tuple[Event | Action, str]] = field(default_factory=list)
    """Events and actions, each with the line that it comes from."""
    lacking: set[str] = field(default_factory=set)
    """Parameters without a gradient after a backward."""
    unsharded: dict[int, set[int]] = field(default_factory=dict)
    """Addresses of unsharded buffers, by unit."""
    lasting: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    """Addresses of what stays from step to step, by unit and kind."""
    nbytes: list[int] = field(default_factory=list)
    """Bytes in use at the end: of each unit, and of the device."""
    numbers: dict[str, object] = field(default_factory=dict)
    """Values that an optimizer keeps in host memory, by name."""


class _Watch:
    """Observes a model's schedule, its lanes, and the device's waits."""

    def __init__(self, model: nn.Module, runtime: Runtime, device: torch.device) -> None:
        self.optimizers: dict[int, Optimizer] = {}
        self._model, self._runtime, self._device = model, runtime, device
        self._names = names_of(model, runtime.units)
        self._problems: dict[tuple[str, str], CaptureProblem] = {}
        self._steps: list[_Step] = []
        self._step = _Step()
        self._number = self._num_queued = self._first_queued = 0
        self._unit: int | None = None
        self._is_watching = False
        self._queued: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._old_gradients: dict[int, torch.Tensor] = {}

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """A context in which the watch sees what happens, for all steps: handoffs of an earlier one are known then."""
        with ExitStack() as seeing:
            seeing.enter_context(self._runtime.observed(self))
            seeing.enter_context(streams_for(self._device).observed(self))
            hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._see_optimizer(optimizer))
            seeing.callback(hook.remove)
            seeing.enter_context(_host_waits(self._device, self._host_waits))
            yield

    def make(self, step: Callable[[], object], is_watched: bool) -> Found:
        """Make a step. Problems are noted if it `is_watched`."""
        self._is_watching = is_watched
        try:
            self._begin()
            step()
            self._end()
        finally:
            self._is_watching = False
        return [], []

    def compare(self) -> Found:
        """Returns the problems of the last two steps, and the units whose unsharded parameters have moved."""
        first, second = self._steps[-2:]
        self._is_watching = True
        self._compare(first, second)
        moved = [name for at, name in enumerate(self._names) if first.unsharded.get(at) != second.unsharded.get(at)]
        return list(self._problems.values()), moved

    def _begin(self) -> None:
        self._step, self._first_queued = _Step(), self._num_queued
        self._queued.clear()
        self._joined.clear()
        parameters = self._model.parameters() if self._is_watching else ()
        self._old_gradients = {id(each): each.grad for each in parameters if each.grad is not None}

    def _end(self) -> None:
        for lane, last in self._queued.items():
            if self._joined.get(lane, -1) < last:
                self._note("outside event", f"the step ends, and has not waited for what its {lane} lane does")
        self._old_gradients.clear()
        # What only a circle of references keeps alive is not kept by the user.
        gc.collect()
        self._step.nbytes = [total(held_by(unit)) for unit in self._runtime.units]
        if self._device.type != "cpu":
            self._step.nbytes.append(torch.accelerator.memory_allocated(self._device))
        for unit, name in zip(self._runtime.units, self._names, strict=True):
            held = held_by(unit).items()
            shards = frozenset(address for address, (kind, _) in held if kind is MemoryKind.SHARDS)
            self._step.lasting[name, "shards"] = shards
        for name, buffer in self._model.named_buffers():
            self._step.lasting["", f"buffer {name}"] = frozenset({buffer.untyped_storage().data_ptr()})
        for optimizer in self.optimizers.values():
            self._look_at_optimizer(optimizer)
        self._steps.append(self._step)

    def _note(self, kind: str, what: str, unit: str | None = None, where: str | None = None) -> None:
        """Note a problem of the steps that are watched; one of a kind for each line."""
        if self._is_watching:
            at = ("" if self._unit is None else self._names[self._unit]) if unit is None else unit
            where = _line(sys._getframe(1)) if where is None else where
            self._problems.setdefault((kind, where or what), CaptureProblem(kind, at, what, where))

    # The schedule

    def begins(self, event: Event) -> None:
        self._unit = getattr(event, "unit", None)
        self._step.schedule.append((event, _line(sys._getframe(1))))
        if type(event) is BeforeBackward and self._old_gradients:
            # What the step has dropped by now is made again in memory of the graph. What is left is added to.
            for name, parameter in self._model.named_parameters():
                gradient = parameter.grad
                if gradient is not None and gradient is self._old_gradients.get(id(parameter)):
                    self._step.lasting["", f"gradient of {name}"] = frozenset({_local(gradient).data_ptr()})
            self._old_gradients.clear()

    def perform(self, action: Action, perform: Callable[[], None]) -> None:
        before, self._unit = self._unit, action.unit
        self._step.schedule.append((action, _line(sys._getframe(1))))
        perform()
        if self._is_watching:
            held = held_by(self._runtime.units[action.unit]).items()
            unsharded = {address for address, (kind, _) in held if kind is MemoryKind.UNSHARDED}
            self._step.unsharded.setdefault(action.unit, set()).update(unsharded)
        self._unit = before

    def ended(self, event: Event) -> None:
        self._unit = None
        if type(event) is EndBackward:
            parameters = self._model.named_parameters()
            self._step.lacking = {name for name, each in parameters if each.requires_grad and each.grad is None}

    # Lanes and the host

    def queues(self, lane: str) -> int:
        self._num_queued += 1
        self._queued[lane] = self._num_queued
        return self._num_queued

    def waits(self, lane: str, number: int, on_host: bool) -> None:
        if on_host:
            self._host_waits("a handoff")
        elif number <= self._first_queued:
            self._note("outside event", f"it waits for what the {lane} lane began before the step")
        self._joined[lane] = max(number, self._joined.get(lane, 0))

    def follows_event(self) -> None:
        self._note("outside event", "gathers follow the event of the step before (set_post_optim_event)")

    def _host_waits(self, cause: str) -> None:
        unit = None if self._unit is None else self._runtime.units[self._unit]
        where = _line(sys._getframe(1))
        reason = OFFLOADED if (unit or self._runtime.root).place.is_elsewhere else ""
        reason = COMPARED if where.startswith("sherd/guard/") else reason
        self._note("host sync", f"the host waits for the device, {cause}" + (reason and f"; {reason}"), where=where)

    # Optimizers

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        own = set(self._model.parameters())
        if any(each in own for group in optimizer.param_groups for each in group["params"]):
            self.optimizers[id(optimizer)] = optimizer

    def _look_at_optimizer(self, optimizer: Optimizer) -> None:
        """Note where the state of `optimizer` is, and what it keeps on the host."""
        kind, on_host = type(optimizer).__name__, self._device.type != "cpu"
        by_unit = {unit.id: name for unit, name in zip(self._runtime.units, self._names, strict=True)}
        for owner, held in held_by_optimizer(optimizer.state, self._device).items():
            self._step.lasting["" if owner is None else by_unit.get(owner, ""), f"optimizer state of {kind}"] = (
                frozenset(held)
            )
        for number, group in enumerate(optimizer.param_groups):
            if on_host and group.get("capturable") is False:
                self._note("host value", f"{kind} counts its steps on the host: capturable=False", "", "")
            for key, value in group.items():
                if isinstance(value, int | float):
                    self._step.numbers[f"{key} of group {number} of {kind}"] = value
        for state in optimizer.state.values() if on_host else ():
            for key, value in state.items():
                on_device = isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.ndim)
                if not on_device and isinstance(value, int | float | torch.Tensor):
                    self._step.numbers.setdefault(f"{key} in the state of {kind}", float(value))

    # The comparison

    def _compare(self, first: _Step, second: _Step) -> None:
        """Note what differs between two steps."""
        # A step that is shorter than the other ends where the other goes on.
        for one, other in zip_longest(first.schedule, second.schedule, fillvalue=(None, "")):
            if one[0] != other[0]:
                text = f"{self._in_words(other[0])} comes where {self._in_words(one[0])} came in the step before"
                at = getattr(other[0] or one[0], "unit", None)
                self._note("schedule", text, "" if at is None else self._names[at], other[1] or one[1])
                break
        for name in sorted(first.lacking ^ second.lacking):
            self._note("schedule", f"{name} got a gradient in one of two steps only", "", "")
        for key in first.lasting.keys() | second.lasting.keys():
            if first.lasting.get(key) != second.lasting.get(key):
                unit, kind = key
                self._note("address", f"{kind}: at other addresses than in the step before", unit, "")
        for before, after, name in zip(first.nbytes, second.nbytes, [*self._names, ""], strict=False):
            if after > before:
                self._note("allocation", f"{after - before:,} bytes more are alive after each step", name, "")
                break
        for number, value in second.numbers.items():
            if number in first.numbers and first.numbers[number] != value:
                self._note("host value", f"{number} was {first.numbers[number]:g} and is {value:g}", "", "")

    def _in_words(self, what: Event | Action | None) -> str:
        at = getattr(what, "unit", None)
        return "the end" if what is None else type(what).__name__ + ("" if at is None else f" of {self._names[at]}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


_PASSED_OVER = {__file__, streams.__file__, warnings.__file__}


def _line(frame: FrameType | None) -> str:
    """Returns the innermost line that is not torch's, and the user's line that has led there, if that is another."""
    frames = [each for each in frames_from(frame) if each.f_code.co_filename not in _PASSED_OVER]
    package = str(Path(__file__).parents[2])
    own: FrameType | None = None
    for each in frames:
        if is_users(each):
            users = f"{each.f_code.co_filename}:{each.f_lineno}"
            return users if own is None else f"{_shown(own)}, called from {users}"
        if own is None and each.f_code.co_filename.startswith(package):
            own = each
    return "" if own is None else _shown(own)


def _shown(frame: FrameType) -> str:
    return f"sherd/{Path(frame.f_code.co_filename).relative_to(Path(__file__).parents[2])}:{frame.f_lineno}"


@contextmanager
def _host_waits(device: torch.device, notice: Callable[[str], None]) -> Iterator[None]:
    """Have `notice` called with the cause of each wait of the host for the device, where the device tells.

    CUDA warns of a wait. The module of another device may have `on_host_wait(function)`.
    """
    if device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            show = warnings.showwarning

            def heard(message: Warning | str, *where: Any, **more: Any) -> None:
                if "synchronizing CUDA operation" in str(message):
                    notice("an operation that synchronizes")
                else:
                    show(message, *where, **more)

            warnings.showwarning = heard
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return
    tell = None if device.type == "cpu" else getattr(torch.get_device_module(device), "on_host_wait", None)
    with ExitStack() as hearing:
        if tell is not None:
            tell(notice)
            hearing.callback(tell, None)
        yield


# Capture


class _Trial:
    """Eager steps and replays of the same step, from one state, which `restore` brings back."""

    def __init__(
        self, model: nn.Module, step: Callable[[], object], optimizers: Iterable[Optimizer], device: torch.device
    ) -> None:
        self._step, self._device = step, device
        self._tensors = dict(_written_by_steps(model, optimizers))
        self._random, self._before = torch.cuda.get_rng_state(device), self._values()
        self._eager: dict[str, torch.Tensor] = {}
        self._replay: Callable[[], None] = _no_replay

    def capture(self) -> Found:
        """Make the eager steps, and capture one."""
        for _ in range(NUM_COMPARED):
            self._step()
        self._eager = self._values()
        self.restore()
        try:
            self._replay = streams.recorded(self._step, self._device)
        except RuntimeError as error:
            return [CaptureProblem("capture", "", reason_of(error))], []
        return [], []

    def replay(self) -> Found:
        """Replay as many steps, and compare."""
        for _ in range(NUM_COMPARED):
            self._replay()
        problems = []
        for name, found in self._values().items():
            change = (self._eager[name].double() - self._before[name].double()).norm()
            if not (found.double() - self._eager[name].double()).norm() <= TOLERANCE * change:
                problems.append(CaptureProblem("capture", "", f"replays give {name} another value than eager steps"))
        return problems, []

    @torch.no_grad()
    def restore(self) -> None:
        torch.cuda.set_rng_state(self._random, self._device)
        for name, each in self._tensors.items():
            each.copy_(self._before[name])

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self._tensors.items()}


def _no_replay() -> None:
    raise AssertionError("a replay comes after its capture")


def _written_by_steps(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a step writes, by name: parameters, buffers, the state of optimizers."""
    named: list[tuple[str, object]] = [*model.named_parameters(), *model.named_buffers()]
    for optimizer in optimizers:
        for number, state in enumerate(optimizer.state.values()):
            named += [(f"{key} of optimizer state {number}", each) for key, each in state.items()]
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor):
            yield name, _local(tensor)
