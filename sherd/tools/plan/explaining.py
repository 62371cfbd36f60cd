"""`explain_memory`: an out of memory error tells what held the memory, and which changes would fit."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sherd.engine import Runtime
from sherd.errors import MemoryLimitError
from sherd.memory.report import root_unit
from sherd.requirements import require_int
from sherd.schedule.actions import Event
from sherd.schedule.moments import begins_step, in_words
from sherd.tensor.ragged import local_part
from sherd.tools.plan.in_words import advice_of, lines_of_advice
from sherd.tools.plan.planner import or_impossible
from sherd.tools.plan.running import Forwards, LossOfOutput, Running, matrices_of, most_within, optimizer_of
from sherd.tools.plan.tracing import StepRecorder, recording
from sherd.tools.simulate.cluster import Cluster, bytes_in, read_cluster, shipped_clusters
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import Outcome, Room, cheapest_changes
from sherd.tools.simulate.settings import Settings
from sherd.tools.simulate.work import TensorKind
from sherd.units import in_bytes

__all__ = ["explain_memory"]

HEAD = "explained by sherd: "
Held = Counter[tuple[str, int]]
"""Bytes by kind and unit."""


@contextmanager
def explain_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    limit: int | str | None = None,
    loss: LossOfOutput | None = None,
    cluster: str | Path | Cluster | None = None,
) -> Iterator[None]:
    """Let an out of memory error from the `with` block tell what held the memory, and which changes would fit.

        with sherd.explain_memory(model, optimizer):
            for batch in batches:
                train(batch)

    The error gets a note: the bytes by kind and unit, the moment, the device's memory, and the up to three cheapest
    changes that would fit, as the simulator of `sherd.plan` predicts for this model and the last batch. No other rank
    is needed. If no note can be made, the note says why. Without an error, each forward and step calls one hook.

    With a limit, all storages on the device are followed, also on a CPU: operations take some microseconds longer, and
    the operation that exceeds the limit raises.

    Args:
        model: what `fully_shard` was called on last, or the outermost wrapper: the root of the units.
        optimizer: of the model.
        limit: the most bytes of tensors on each rank's device, also as "60 GiB"; None: no limit but the device's.
        loss: of the model's output, on the meta device. None: the `loss` in the output, for tokens the cross-entropy of
            the logits, else the sum of the outputs.
        cluster: predicts times, as for `plan`. None: the shipped cluster with this device.

    Raises:
        MemoryLimitError: tensors take more than `limit`. It is a MemoryError.
        ModuleError: `model` is not a sharded module.
        PolicyError: `limit` is below 1.
        ClusterError: `limit` is a text but no size, or there is no such `cluster`.
        StateError: there is a limit, and the memory of the model is tracked already.
    """
    unit = root_unit(model, "explain_memory")
    nbytes = bytes_in(limit, "explain_memory(limit=...)") if isinstance(limit, str) else limit
    if nbytes is not None:
        require_int("explain_memory(limit={})", nbytes, 1)
    seen = Forwards()
    follower = None if nbytes is None else _Follower(Runtime.of(unit, model), model, optimizer, nbytes)
    with ExitStack() as hooks:
        # This hook runs before the engine's hooks, whose all-gathers may exceed the limit.
        hooks.callback(model.register_forward_pre_hook(seen.begins, prepend=True, with_kwargs=True).remove)
        hooks.callback(optimizer.register_step_post_hook(seen.stepped).remove)
        try:
            with nullcontext() if follower is None else recording(follower, follower.runtime, model, optimizer):
                yield
        except Exception as error:
            cause = _out_of_memory(error)
            if cause is not None and (follower is not None or not isinstance(cause, MemoryLimitError)):
                resting: list[str] = []
                try:
                    if nbytes is not None:
                        resting = [*_resting(Runtime.of(unit, model), optimizer, nbytes)]
                    running = Running(model, optimizer, seen, loss, _cluster(cluster, unit.mesh.device))
                    lines = _lines(cause, running, Runtime.of(unit, model), optimizer, follower)
                    text = "\n".join([*lines, *resting])
                except Exception as trouble:  # nothing may hide the user's error
                    said = f"no more can be said: {type(trouble).__name__}: {' '.join(str(trouble).split())}"
                    text = "\n".join(resting) or said
                getattr(cause, "add_note", warnings.warn)(HEAD + text)  # Python 3.10 has no notes
            raise


class _Follower(StepRecorder):
    """Follows all storages through any number of steps, and raises when their bytes exceed the limit."""

    def __init__(self, runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer, limit: int) -> None:
        super().__init__(runtime, optimizer, self._look_at_limit)
        self.runtime, self._limit = runtime, limit
        self._names = [unit.name for unit in self._units(model)]
        self._has_raised, self._held = False, Held()

    def after_step(self, *_: object) -> None:
        self._look_at_optimizer()
        self.storages.forget()
        self._phase, self._running, self._moment = "", [-1], None

    def _do(self, label: Any) -> Any:
        before, self._label = self._label, label  # no times are needed
        return before

    def begins(self, event: Event) -> None:
        # Each step may exceed the limit once.
        self._has_raised = self._has_raised and not begins_step(event)
        super().begins(event)

    def _look_at_limit(self, nbytes: int) -> None:
        if nbytes > self._limit and not self._has_raised:
            self._has_raised = True  # memory for cleaning up after the error may exceed the limit
            if self._phase == "forward":
                self.storages.become(TensorKind.ACTIVATION)
            self._held = self.storages.held_now()
            when = self._moment if isinstance(self._moment, str) else in_words(self._moment, self._names)
            said = f"{in_bytes(nbytes)} are alive {when}, more than the limit of {in_bytes(self._limit)}"
            raise MemoryLimitError("\n".join([said, *_table(self._held, self._names)]))

    def lines(self, running: Running) -> Iterator[str]:
        peak, inputs = running.predict(running.settings).timeline.peak, TensorKind.INPUT.value
        # Tensors that are not of this step, as of another model, take as much with other settings.
        others = _of_kind(self._held, inputs) - peak.by_kind.get(inputs, 0)
        beside = max(0, others, self._held.total() - peak.nbytes)
        return _advice(running, lambda of: of.timeline.peak.nbytes + beside, self._limit)


def _lines(
    error: BaseException, running: Running, runtime: Runtime, optimizer: object, follower: _Follower | None
) -> Iterator[str]:
    """Yields the lines of the note for `error`."""
    if follower is not None and isinstance(error, MemoryLimitError):
        yield from follower.lines(running)
        return
    now, device = running.predict(running.settings), runtime.root.mesh.device
    timeline = now.timeline
    names = [unit.name for unit in timeline.units]
    phase, number = _where(error, runtime, optimizer)
    at_peak = most_within(timeline, phase, number)
    yield f"out of memory in {phase or 'the step'}{f' of {names[number]}' if number >= 0 else ''}"
    yield f"predicted to be alive then: {in_bytes(at_peak.total())}"
    yield from _table(at_peak, names)
    if device.type == "cpu":
        yield from _advice(running, lambda of: of.timeline.peak.nbytes, timeline.peak.nbytes - 1)
        return
    (free, total), allocated = torch.accelerator.get_memory_info(device), torch.accelerator.memory_allocated(device)
    reserved, needed = torch.accelerator.memory_reserved(device), now.reserved_bytes
    yield f"of {in_bytes(total)}, {in_bytes(free)} are free; torch has {in_bytes(allocated)} in {in_bytes(reserved)}"
    beside = max(0, free + reserved + 1 - needed)
    yield f"a step is predicted to take {in_bytes(needed)}, and {in_bytes(beside)} are taken beside it"
    yield from _advice(running, lambda of: of.reserved_bytes + beside, free + reserved)


def _resting(runtime: Runtime, optimizer: torch.optim.Optimizer, limit: int) -> Iterator[str]:
    """Yields lines if the memory between forward and backward is above the limit already, under any other settings."""
    mesh, groups = runtime.root.mesh, [weights.group for unit in runtime.units for weights in unit.weights]
    parameters = sum(group.shard_buffer.nbytes for group in groups if not group.is_offloaded)
    trained, matrices = [group for group in groups if group.trained], matrices_of(optimizer)
    sizes = [local_part(each.parameter).nbytes for group in trained for each in group.optimizer_params]
    gradients = 0 if any(group.is_offloaded for group in groups) else sum(sizes)
    own = [record.local.nbytes for group in trained for record in group.parameters if id(record.shard) in matrices]
    of_matrices = sum(own) if gradients else 0
    states = (gradients - of_matrices) * optimizer_of(optimizer).states + of_matrices
    total = parameters + gradients + states
    if total <= limit:
        return
    yield f"shards, gradients and optimizer state alone take {in_bytes(total)}, more than the limit:"
    parts = ((parameters, "parameters"), (gradients, "gradients"), (states, "optimizer state"))
    yield f"  {', '.join(f'{in_bytes(nbytes)} of {name}' for nbytes, name in parts)}"
    if mesh.device.type != "cpu":
        yield "  the cheapest change: offload_policy=CPUOffloadPolicy(), which keeps them in host memory"
    else:
        least = -(-total * mesh.num_shards // limit)
        yield f"  the cheapest change: shard over {least} ranks at least; now there are {mesh.num_shards} to shard over"


def _advice(running: Running, size: Callable[[Prediction], int], limit: int) -> Iterator[str]:
    def outcome(settings: Settings) -> Outcome:
        prediction = running.predict(settings)
        return Outcome(prediction.timeline.seconds, size(prediction))

    settings = running.settings
    changes = cheapest_changes(or_impossible(outcome), running.space, settings, Room(limit))
    if changes:
        yield f"what would fit, instead of {settings}"
    else:
        yield f"no other settings that were tried fit; now: {settings}"
    yield from lines_of_advice([advice_of(settings, outcome(settings), *change) for change in changes])


def _where(error: BaseException, runtime: Runtime, optimizer: object) -> tuple[str, int]:
    """Returns the phase and the unit in which `error` was raised.

    The unit is the last one that backward reached, or the innermost one with a frame in the traceback.
    """
    numbers = {id(module): at for at, unit in enumerate(runtime.units) for module in unit.modules}
    phase, number, order = "", -1, runtime.schedule.state.backward
    reached = order.learnt[: order.at] if order.strayed is None else order.strayed
    if runtime.in_backward and reached:
        phase, number = "backward", reached[-1]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if caller is optimizer:
            return "optimizer", -1
        if id(caller) in numbers:
            phase, number = "recompute" if runtime.in_backward else "forward", numbers[id(caller)]
    return phase, number


def _of_kind(held: Held, kind: str) -> int:
    return sum(nbytes for (of, _), nbytes in held.items() if of == kind)


def _table(held: Held, names: list[str]) -> Iterator[str]:
    """Yields a line for each kind, with the two units that hold most of it."""
    for kind in sorted({kind for kind, _ in held}, key=lambda kind: -_of_kind(held, kind)):
        units = Counter({number: nbytes for (of, number), nbytes in held.items() if of == kind and number >= 0})
        most = ", ".join(f"{names[number]} {in_bytes(nbytes)}" for number, nbytes in units.most_common(2))
        yield f"  {kind:22} {in_bytes(_of_kind(held, kind)):>10}   {most}".rstrip()


def _cluster(given: str | Path | Cluster | None, device: torch.device) -> Cluster:
    """Returns the given cluster, or the shipped one with `device`, or else that of H100s."""
    if given is None:
        name = str(getattr(torch.get_device_module(device), "get_device_name", str)(device)).lower()
        known = (cluster for cluster in shipped_clusters() if cluster in name)
        given = "laptop" if device.type == "cpu" else next(known, "h100")
    return given if isinstance(given, Cluster) else read_cluster(given)


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """Returns the out of memory error among `error` and its causes, unless it has a note already."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            is_explained = any(note.startswith(HEAD) for note in getattr(error, "__notes__", ()))
            return None if is_explained else error
        error = error.__cause__
    return None
