"""`capturable`: whether a training step may be captured as a graph, and what keeps it from that, by unit and line."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sherd._torch import frames_from, is_users, users_line
from sherd.comm import streams
from sherd.comm.agreement import gathered_along
from sherd.engine import Runtime, ShardedParameter, Unit
from sherd.errors import CommError, StateError, in_short, reason_of
from sherd.memory.report import names_of, root_unit
from sherd.memory.watch import held_by, total
from sherd.policy import Disk
from sherd.requirements import require_int
from sherd.schedule.actions import Action, BeforeBackward, EndBackward, Event
from sherd.schedule.moments import MemoryKind
from sherd.tensor.ragged import local_part

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
MOVED = "moved"
"""The kind of a finding that is no problem: unsharded parameters of a unit move."""
DIFFERS = {
    "schedule": "{what} got a gradient in one of two steps only",
    "address": "{what}: at other addresses than in the step before",
    "allocation": "{more:,} bytes more are alive after each step",
    "host value": "{what} was {before} and is {after}",
    MOVED: "{what}",
}
"""By kind: a fact that differs between two steps, in words."""
COMPARED = "ranks compare what replicas hold, now and then: capture the next step, or CommPolicy(divergence='trust')"
NUM_COMPARED = 2
"""Steps in which replays are compared with the eager steps."""
TOLERANCE = 0.02
"""The largest difference between them, as a share of the change that the steps make."""
PACKAGE = Path(__file__).parents[2]


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
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"{self.kind}{unit}: {self.what}{where} ({ranks})"


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
            proof = f"as watched on {self.device}" + ("; captured, and replays give its values" * self.is_replayed)
            lines = [f"the step may be captured: {proof}"]
        if self.moved:
            lines += [
                f"note: unsharded parameters move between steps ({in_short(self.moved)}); see CaptureReport.moved"
            ]
        if self.device == "cpu":
            lines += ["note: a CPU shows no waits of the host, events and memory; ask again on an accelerator"]
        return "\n".join(lines)


def capturable(model: nn.Module, step: Callable[[], object], *, warmup: int = 5) -> CaptureReport:
    """Watch two steps of a training, and report what keeps a step from being captured as a graph and replayed.

    A graph repeats the work of one step on the device, without Python. So in the step the host must not wait for the
    device; no stream may wait for an event from outside of the step; memory that is alive between steps must stay where
    it is; nothing that a step makes may be kept; units, gradients and numbers must be those of the step before.

        x, y = next(batches)                      # copy later batches into these
        print(sherd.capturable(model, one_step))

    The steps are real: they train the model. On CUDA, if nothing was found, a step is also captured, and replays are
    compared with eager steps; after that the model and its optimizers are as before. All ranks must make this call.

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
        found = _agreed(unit, watch.compare)
        problems = tuple(each for each in found if each.kind != MOVED)
        is_tried = not problems and device.type == "cuda"
        if is_tried:
            trial = _Trial(step, watch, device)
            # Only if all ranks have captured: the replay of one would wait for the others.
            problems = _agreed(unit, trial.capture) or _agreed(unit, trial.replay)
            trial.restore()
    moved = dict.fromkeys(each.unit for each in found if each.kind == MOVED)
    return CaptureReport(problems, tuple(moved), device.type, is_tried and not problems)


def _agreed(unit: Unit, look: Callable[[], list[CaptureProblem]]) -> tuple[CaptureProblem, ...]:
    """Returns what all ranks have found, by kind. Raises StateError on all ranks if `look` raised on one."""
    rank, failure, why = torch.distributed.get_rank(), None, ""
    found: list[CaptureProblem] = []
    try:
        found = look()
    except Exception as error:
        failure, why = error, f"{type(error).__name__}: {reason_of(error)} (rank {rank})"
    mesh, told = unit.mesh.mesh, [(rank, why, found)]
    try:
        told = gathered_along(map(mesh.get_group, range(mesh.ndim)), told[0], "what capturable has found")
    except CommError:
        if failure is None:
            raise
        # The other ranks are still in the step, and have been told by the guard.
    if raised := [why for _, why, _ in told if why]:
        raise StateError(f"capturable: the step raised {raised[0]}") from failure
    ranks = defaultdict[CaptureProblem, list[int]](list)
    for rank, _, of_rank in told:
        for each in of_rank:
            ranks[each].append(rank)
    kinds, everything = [*REMEDIES, MOVED], (replace(each, ranks=tuple(of)) for each, of in ranks.items())
    return tuple(sorted(everything, key=lambda each: kinds.index(each.kind)))


# The watch


@dataclass
class _Step:
    """The record of one step: its events and actions, each with its line, and what must be the same in the next step.

    `facts` are addresses and numbers, by the kind of problem that a difference is, unit, and name.
    """

    schedule: list[tuple[Event | Action | None, str]] = field(default_factory=list)
    facts: defaultdict[tuple[str, str, str], set[float]] = field(default_factory=lambda: defaultdict(set))


class _Watch:
    """Observes a model's schedule, its lanes, and the device's waits."""

    def __init__(self, model: nn.Module, runtime: Runtime, device: torch.device) -> None:
        self._model, self._runtime, self._device = model, runtime, device
        self._names = names_of(model, runtime.units)
        self._optimizers: dict[int, Optimizer] = {}
        self._problems: dict[tuple[str, str], CaptureProblem] = {}
        self._steps: list[_Step] = []
        self._step = _Step()
        self._unit: int | None = None
        self._is_watching = False
        self._num_queued = self._first_queued = 0
        self._queued: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._gradients: list[tuple[str, nn.Parameter, torch.Tensor]] = []
        """Those from before the step, until its backward."""

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """A context in which the watch sees what happens, for all steps: handoffs of an earlier one are known then."""
        with ExitStack() as seeing:
            seeing.enter_context(self._runtime.observed(self))
            seeing.enter_context(streams.streams_for(self._device).observed(self))
            seeing.enter_context(_host_waits(self._device, self._host_waits))
            seeing.callback(register_optimizer_step_pre_hook(lambda each, *_: self._see_optimizer(each)).remove)
            yield

    def make(self, step: Callable[[], object], is_watched: bool) -> list[CaptureProblem]:
        """Make a step. Problems are noted if it `is_watched`."""
        self._step, self._first_queued, self._is_watching = _Step(), self._num_queued, is_watched
        self._queued.clear()
        self._joined.clear()
        named = self._model.named_parameters() if is_watched else ()
        self._gradients = [(name, each, each.grad) for name, each in named if each.grad is not None]
        try:
            step()
            for lane, last in self._queued.items():
                if self._joined.get(lane, -1) < last:
                    self._note("outside event", f"the step ends, and has not waited for what its {lane} lane does")
            self._gradients.clear()
            self._look()
        finally:
            self._is_watching = False
        self._steps.append(self._step)
        return []

    def compare(self) -> list[CaptureProblem]:
        """Returns the problems of the last two steps."""
        first, second = self._steps[-2:]
        self._is_watching = True
        # A step that is shorter than the other ends where the other goes on.
        for (one, line), (other, others) in zip_longest(first.schedule, second.schedule, fillvalue=(None, "")):
            if one != other:
                text = f"{self._in_words(other)} comes where {self._in_words(one)} came in the step before"
                self._note("schedule", text, self._name_of(other or one), others or line)
                break
        for kind, unit, what in dict.fromkeys([*second.facts, *first.facts]):
            before, after = (each.facts[kind, unit, what] for each in (first, second))
            more = int(sum(after) - sum(before))
            if before != after and (kind != "allocation" or more > 0):
                values = {"before": _listed(before), "after": _listed(after), "more": more}
                self._note(kind, DIFFERS[kind].format(what=what, **values), unit, "")
        return list(self._problems.values())

    def _note(self, kind: str, what: str, unit: str | None = None, where: str | None = None) -> None:
        """Note a problem of the steps that are watched; one of a kind for each line."""
        if self._is_watching:
            at = ("" if self._unit is None else self._names[self._unit]) if unit is None else unit
            where = _line(sys._getframe()) if where is None else where
            self._problems.setdefault((kind, where or what), CaptureProblem(kind, at, what, where))

    def _name_of(self, what: Event | Action | None) -> str:
        at = getattr(what, "unit", None)
        return "" if at is None else self._names[at]

    def _in_words(self, what: Event | Action | None) -> str:
        unit = self._name_of(what)
        return "the end" if what is None else type(what).__name__ + (unit and f" of {unit}")

    # The schedule

    def begins(self, event: Event) -> None:
        self._unit = getattr(event, "unit", None)
        self._step.schedule.append((event, _line(sys._getframe())))
        if type(event) is BeforeBackward:
            # What the step has dropped by now is made again in memory of the graph. What is left is added to.
            for name, parameter, gradient in self._gradients:
                if parameter.grad is gradient:
                    self._step.facts["address", "", f"gradient of {name}"].add(local_part(gradient).data_ptr())
            self._gradients.clear()

    def perform(self, action: Action, perform: Callable[[], None]) -> None:
        before, self._unit = self._unit, action.unit
        self._step.schedule.append((action, _line(sys._getframe())))
        perform()
        if self._is_watching:
            held, name = held_by(self._runtime.units[action.unit]), self._names[action.unit]
            unsharded = (address for address, (kind, _) in held.items() if kind is MemoryKind.UNSHARDED)
            self._step.facts[MOVED, name, name].update(unsharded)
        self._unit = before

    def ended(self, event: Event) -> None:
        self._unit = None
        if type(event) is EndBackward:
            for name, each in self._model.named_parameters():
                self._step.facts["schedule", "", name] = {each.grad is None}

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
        where, units = _line(sys._getframe()), self._runtime.units
        reasons = [COMPARED] if where.startswith("sherd/guard/") else []
        reasons += [_offload_of(unit) for unit in (units if self._unit is None else [units[self._unit]])]
        reason = next(filter(None, reasons), "")
        self._note("host sync", f"the host waits for the device, {cause}" + (reason and f"; {reason}"), where=where)

    # What lasts

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        own = set(self._model.parameters())
        if any(each in own for group in optimizer.param_groups for each in group["params"]):
            self._optimizers[id(optimizer)] = optimizer
            may_be = all(group.get("capturable", True) for group in optimizer.param_groups)
            if self._device.type != "cpu" and not may_be:
                what = f"{type(optimizer).__name__} counts its steps on the host: capturable=False"
                self._note("host value", what, "", "")

    def lasting(self) -> Iterator[tuple[str, str, object]]:
        """Yields what lasts from step to step, with its unit and a name: shards, buffers, what optimizers keep."""
        for name, unit in zip(self._names, self._runtime.units, strict=True):
            yield from ((name, "shards", each) for each in unit.shards.optimizer_params)
        others = ((name, each) for name, each in self._model.named_parameters() if ShardedParameter.of(each) is None)
        yield from (("", name, each) for name, each in others)
        yield from (("", f"buffer {name}", each) for name, each in self._model.named_buffers())
        for optimizer in self._optimizers.values():
            kind = type(optimizer).__name__
            for number, group in enumerate(optimizer.param_groups):
                yield from (("", f"{key} of group {number} of {kind}", each) for key, each in group.items())
            for state in optimizer.state.values():
                yield from (("", f"{key} in the state of {kind}", each) for key, each in state.items())

    def _look(self) -> None:
        """Note at the end of a step what must be the same after the next one."""
        # What only a circle of references keeps alive is not kept by the user.
        gc.collect()
        facts, device = self._step.facts, self._device.type
        for unit, what, each in self.lasting():
            if isinstance(each, torch.Tensor) and (each.ndim or each.device.type == device):
                facts["address", unit, what].add(local_part(each).data_ptr())
            elif isinstance(each, torch.Tensor | int | float):
                facts["host value", unit, what].add(float(each))
        for name, of in zip(self._names, self._runtime.units, strict=True):
            facts["allocation", name, ""].add(total(held_by(of)))
        if device != "cpu":
            facts["allocation", "", ""].add(torch.accelerator.memory_allocated(self._device))


def _offload_of(unit: Unit) -> str:
    """Returns why the host waits for what rests elsewhere, naming the axis that the user has set; "" if it does not."""
    place = unit.place
    if place.is_elsewhere:
        axis = "gradients='host'" if place.parameters == "device" else f"parameters={place.parameters!r}"
        also = ", as CPUOffloadPolicy() has it," if place.parameters == "host" else ""
        return f"OffloadPolicy({axis}){also} steps in host memory, for which the host waits: leave it out"
    for axis, rest in (("optimizer", place.state), ("masters", place.masters)):
        if isinstance(rest, Disk):
            return f"OffloadPolicy({axis}={rest!r}) reads and writes files, for which the host waits: leave it out"
        if rest == "host" and not place.pinned:
            return f"OffloadPolicy({axis}='host', pin_memory=False): the host waits for each copy; pin memory"
    return ""


def _listed(numbers: set[float]) -> str:
    return ", ".join(f"{each:g}" for each in sorted(numbers))


def _line(frame: FrameType) -> str:
    """Returns the innermost line that is not torch's, and the user's line that has led there, if that is another."""
    for each in frames_from(frame):
        file, number = each.f_code.co_filename, each.f_lineno
        if is_users(each):
            return f"{file}:{number}"
        if file.startswith(str(PACKAGE)) and file not in (__file__, streams.__file__):
            users = users_line(each)
            return f"sherd/{Path(file).relative_to(PACKAGE)}:{number}" + (users and f", called from {users}")
    return ""


@contextmanager
def _host_waits(device: torch.device, notice: Callable[[str], None]) -> Iterator[None]:
    """Have `notice` called with the cause of each wait of the host for the device, where the device tells.

    CUDA warns of a wait. The module of another device may have `on_host_wait(function)`.
    """
    with ExitStack() as hearing:
        if device.type == "cuda":
            hearing.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            show = warnings.showwarning

            def heard(message: Warning | str, *where: Any, **more: Any) -> None:
                if "synchronizing CUDA operation" in str(message):
                    notice("an operation that synchronizes")
                else:
                    show(message, *where, **more)

            warnings.showwarning = heard
            hearing.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        elif (tell := getattr(torch.get_device_module(device), "on_host_wait", None)) is not None:
            tell(notice)
            hearing.callback(tell, None)
        yield


class _Trial:
    """Eager steps and replays of the same step, from one state of what lasts, which `restore` brings back."""

    def __init__(self, step: Callable[[], object], watch: _Watch, device: torch.device) -> None:
        self._step, self._device = step, device
        lasting = [(what, each) for _, what, each in watch.lasting() if isinstance(each, torch.Tensor)]
        self._lasting = [(what, local_part(each).detach()) for what, each in lasting]
        self._random, self._before = torch.cuda.get_rng_state(device), self._values()

    def capture(self) -> list[CaptureProblem]:
        """Make the eager steps, and capture one."""
        for _ in range(NUM_COMPARED):
            self._step()
        self._eager = self._values()
        self.restore()
        try:
            self._replay = streams.recorded(self._step, self._device)
        except RuntimeError as error:
            return [CaptureProblem("capture", "", reason_of(error))]
        return []

    def replay(self) -> list[CaptureProblem]:
        """Replay as many steps, and compare."""
        for _ in range(NUM_COMPARED):
            self._replay()
        names, values = [what for what, _ in self._lasting], (self._before, self._eager, self._values())
        wrong = [what for what, *of_tensor in zip(names, *values, strict=True) if not _is_near(*of_tensor)]
        return [CaptureProblem("capture", "", f"replays give {what} another value than eager steps") for what in wrong]

    @torch.no_grad()
    def restore(self) -> None:
        torch.cuda.set_rng_state(self._random, self._device)
        for (_, each), value in zip(self._lasting, self._before, strict=True):
            each.copy_(value)

    def _values(self) -> list[torch.Tensor]:
        return [each.clone() for _, each in self._lasting]


def _is_near(before: torch.Tensor, eager: torch.Tensor, found: torch.Tensor) -> bool:
    change, difference = (each.double() - eager.double() for each in (before, found))
    return bool(difference.norm() <= TOLERANCE * change.norm())
