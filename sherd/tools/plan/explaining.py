"""`explain_memory`: an out of memory error tells what held the memory, and which changes would fit."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sherd.api.blocks import repeated_blocks
from sherd.api.module import FSDPModule
from sherd.codecs import codec_of
from sherd.engine import BoundForward, Runtime, Unit
from sherd.errors import MemoryLimitError, StateError, UnsupportedError
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.memory.report import MemoryReport, memory_report, root_unit
from sherd.optim.matrix import MatrixOptimizer
from sherd.requirements import require_int
from sherd.schedule.actions import Event
from sherd.schedule.moments import MemoryKind, begins_step, in_words
from sherd.schedule.state import Keep
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.in_words import advice_of, lines_of_advice
from sherd.tools.plan.plan import num_samples, resized_batch
from sherd.tools.plan.planner import Planner, Training, or_impossible
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.plan.sharding import sharded_of, shares_of_blocks, stepped_bytes
from sherd.tools.plan.tracing import StepRecorder, recording
from sherd.tools.simulate.cluster import Cluster, bytes_in, read_cluster, shipped_clusters
from sherd.tools.simulate.predict import Prediction
from sherd.tools.simulate.search import Outcome, Room, cheapest_changes
from sherd.tools.simulate.segments import OptimizerPart
from sherd.tools.simulate.settings import SHARES, Mesh, Settings, Space, nearest_offload
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer, Sharded
from sherd.tools.simulate.timeline import Lane, Timeline
from sherd.tools.simulate.work import Enter, TensorKind, Work
from sherd.units import in_bytes
from sherd.wrap.names import WRAPPED, plain_name

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
                    report = memory_report(model, optimizer)
                    resting = [*_elsewhere(report)]
                    if nbytes is not None:
                        resting += _resting(Runtime.of(unit, model), optimizer, report, nbytes)
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
            raise MemoryLimitError("\n".join([said, *_table(self._held, self._names, _formats(self.runtime))]))

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
    yield from _table(at_peak, names, _formats(runtime))
    if device.type == "cpu":
        yield from _advice(running, lambda of: of.timeline.peak.nbytes, timeline.peak.nbytes - 1)
        return
    (free, total), allocated = torch.accelerator.get_memory_info(device), torch.accelerator.memory_allocated(device)
    reserved, needed = torch.accelerator.memory_reserved(device), now.reserved_bytes
    yield f"of {in_bytes(total)}, {in_bytes(free)} are free; torch has {in_bytes(allocated)} in {in_bytes(reserved)}"
    more = max(0, free + reserved + 1 - needed)
    yield f"a step is predicted to take {in_bytes(needed)}, and {in_bytes(more)} are taken in addition"
    yield from _advice(running, lambda of: of.reserved_bytes + more, free + reserved)


def _elsewhere(report: MemoryReport) -> Iterator[str]:
    """Yields lines with what rests in host memory and on disks now, by kind."""
    for where, rows in (("in host memory", report.host), ("on disks", report.disk)):
        held = Counter[str]()
        for row in rows:
            held[row.kind] += row.now
        if held.total():
            yield f"{where}: {', '.join(f'{in_bytes(nbytes)} of {kind}' for kind, nbytes in held.items() if nbytes)}"


def _resting(runtime: Runtime, optimizer: torch.optim.Optimizer, report: MemoryReport, limit: int) -> Iterator[str]:
    """Yields lines if the memory between forward and backward is above the limit already, under any other settings."""
    mesh, groups = runtime.root.mesh, [weights.group for unit in runtime.units for weights in unit.weights]
    parameters = sum(group.shard_numel * group.compute_dtype.itemsize for group in groups if group.place.keeps_copies)
    groups, matrices = [group for group in groups if not group.is_offloaded], matrices_of(optimizer)
    parameters += sum(group.shard_buffer.nbytes for group in groups)
    trained = [(group, each.parameter) for group in groups if group.trained for each in group.optimizer_params]
    gradients = sum(stepped_bytes(each, group) for group, each in trained)
    near = sum(stepped_bytes(each, group) for group, each in trained if not group.place.brings_state)
    masters = sum(row.now for row in report.rows if row.kind == MemoryKind.MASTERS.value)
    records = [record for group in groups if group.trained for record in group.parameters]
    of_matrices = sum(record.local.nbytes for record in records if id(record.shard) in matrices) if near else 0
    states = (near - of_matrices) * optimizer_of(optimizer).states + of_matrices
    total = parameters + gradients + states + masters
    if total <= limit:
        return
    yield f"shards, gradients and optimizer state alone take {in_bytes(total)}, more than the limit:"
    parts = {"parameters": parameters, "gradients": gradients, "optimizer state": states, "masters": masters}
    yield f"  {', '.join(f'{in_bytes(nbytes)} of {name}' for name, nbytes in parts.items() if nbytes)}"
    if mesh.device.type != "cpu":
        has_masters = any(group.masters is not None for group in groups)
        policy = "OffloadPolicy(parameters='host', masters='host')" if has_masters else "CPUOffloadPolicy()"
        yield f"  the cheapest change: offload_policy={policy}, which keeps them in host memory"
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


def _formats(runtime: Runtime) -> dict[str, str]:
    """Returns the formats of what gathers and reductions send encoded, by the kind of its bytes."""
    meshes = [mesh for unit in runtime.units for mesh in unit.meshes]
    gathers = [codec.name for mesh in meshes if (codec := mesh.gather_codec) is not None]
    wires = [codec_of(each.wire) for mesh in meshes for each in mesh.comm.reductions if each is not None]
    sums = [codec.name for codec in wires if codec is not None]
    by_kind = ((MemoryKind.ROWS, gathers), (MemoryKind.SENT, gathers), (MemoryKind.TRANSPORT, sums))
    return {kind.value: ", ".join(dict.fromkeys(names)) for kind, names in by_kind if names}


def _table(held: Held, names: list[str], formats: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each kind, with its format and the two units that hold most of it."""
    for kind in sorted({kind for kind, _ in held}, key=lambda kind: -_of_kind(held, kind)):
        units = Counter({number: nbytes for (of, number), nbytes in held.items() if of == kind and number >= 0})
        most = ", ".join(f"{names[number]} {in_bytes(nbytes)}" for number, nbytes in units.most_common(2))
        name = f"{kind} ({formats[kind]})" if kind in formats else kind
        yield f"  {name:22} {in_bytes(_of_kind(held, kind)):>10}   {most}".rstrip()


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


# The model that runs, read for the simulator: what a step takes, with its own settings and with others


LossOfOutput = Callable[[Any], Tensor]
"""Returns the loss, a scalar, of the model's output."""


class Forwards:
    """Hooks on a training: the arguments of its last forward, on the meta device, and the forwards in a step."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.micro_batches, self._number = 1, 0
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []

    def begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward is about to run."""
        if torch.is_grad_enabled():
            self._number += 1
            self.micro_batches = max(self.micro_batches, self._number)
            shapes = [(tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs))]
            if shapes != self._shapes:
                self._shapes, self.batch = shapes, resized_batch((args, kwargs), 0, 0)

    def stepped(self, *_: object) -> None:
        """The optimizer has stepped."""
        self._number = 0


class Running(Planner):
    """Predicts steps of a model that is sharded already, at any moment, without values and without other ranks.

    `settings` are the model's own, and `space` the changes that keep its sharding.

    Raises:
        StateError: the model has not run yet. UnsupportedError: it is also cut over other axes of ranks.
        InputError: it does not run without values.
    """

    # The holes of the allocator's pools depend on all that the process has allocated so far.
    has_holes = False

    def __init__(
        self, model: nn.Module, stepper: torch.optim.Optimizer, seen: Forwards, loss: LossOfOutput | None, on: Cluster
    ) -> None:
        units = Unit.below(model)
        meshes = {parameter.mesh for unit in units for parameter in unit.parameters if parameter.mesh.num_shards > 1}
        if seen.batch is None or any("shard_transport" not in vars(mesh) for mesh in meshes):
            raise StateError("the model has not run in here yet")  # and to make a transport ranks would have to meet
        own, first = units[0].mesh, num_samples(seen.batch)
        training = Training(
            plain_copy(model),
            lambda size: resized_batch(seen.batch, first, size),
            ModelLayout(partial(_loss_of, given=loss)),
            optimizer_of(stepper),
            units[0].precision.param_dtype,
            samples=first,
        )
        super().__init__(training, on)
        work = self.read(first)
        by_matrix = matrices_of(stepper)
        matrices = {plain_name(name) for name, each in Unit.named_members(model).items() if id(each) in by_matrix}
        sharded = self._as_it_is = sharded_of(model, work, training.optimizer, matrices)
        self._is_checkpointed = any(isinstance(event, Enter) and event.again for event in work.events)
        self.settings = Settings(
            Mesh(own.num_shards, own.num_replicas),
            reshard=all(spec.after_forward is not Keep.ALWAYS for spec in sharded.specs[1:]),
            checkpointing=float(self._is_checkpointed),
            recompute="own" if self._is_checkpointed else "full",
            offload=nearest_offload((unit.offload, unit.nbytes) for unit in sharded.units),
            prefetch=max(sharded.limits.forward_depth, sharded.limits.backward_depth),
            micro_batch=first,
            step_in_backward=any(unit.steps_in_backward for unit in units) and not training.optimizer.is_muon,
            micro_batches=seen.micro_batches,
        )
        fixed = {"mesh", "strategy", "placement", "wrapping"}
        is_fixed = own.device.type == "cpu" or on.one_memory or self.settings.offload != "nothing"
        fixed |= {"offload"} if is_fixed else set()
        fixed |= (
            {"checkpointing", "recompute"} if self._is_checkpointed or not repeated_blocks(training.model) else set()
        )
        num_ranks = self.settings.mesh.num_ranks
        samples = first * seen.micro_batches * num_ranks
        shares = shares_of_blocks(training.model, SHARES)
        self.space = Space(num_ranks, samples, on.devices_per_node, frozenset(fixed), most_samples=first, shares=shares)

    def _read_once(self, micro_batch: int, mesh: Mesh) -> Work:
        work = super()._read_once(micro_batch, mesh)
        modules = tuple(replace(module, name=plain_name(module.name)) for module in work.modules)
        parameters = tuple(replace(parameter, name=plain_name(parameter.name)) for parameter in work.parameters)
        return replace(work, modules=modules, parameters=parameters)

    def _work_of(self, micro_batch: int, mesh: Mesh, checkpointing: float, recompute: str) -> Work:
        return super()._work_of(micro_batch, mesh, 0.0 if self._is_checkpointed else checkpointing, recompute)

    def _offloaded(self, sharded: Sharded, settings: Settings) -> Sharded:
        if settings.offload == self.settings.offload:
            return sharded
        if settings.offload.startswith("masters"):
            raise UnsupportedError("masters take the place of weights that are not sharded yet")
        return super()._offloaded(sharded, settings)

    def _cut_step(self, _: Settings) -> tuple[OptimizerPart, ...]:
        return ()  # Buckets of matrices: their bytes are few, and to plan them ranks would have to be imagined.

    def _shard_once(self, settings: Settings) -> Sharded:
        sharded, specs, prefetch = self._as_it_is, self._as_it_is.specs, settings.prefetch
        if settings.reshard != self.settings.reshard:
            kept = Keep.NOTHING if settings.reshard else Keep.ALWAYS
            specs = (specs[0], *(replace(spec, after_forward=kept) for spec in specs[1:]))
        limits = replace(sharded.limits, forward_depth=prefetch, backward_depth=prefetch)
        return replace(sharded, specs=specs, limits=limits if prefetch != self.settings.prefetch else sharded.limits)


def _loss_of(model: nn.Module, batch: Any, given: LossOfOutput | None) -> Tensor:
    def called(args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return given(called(*batch)) if given is not None else own_or_usual_loss(cast(nn.Module, called), batch)


def optimizer_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns `optimizer` as the simulator knows it. One of no known kind is taken for AdamW.

    The state of a `MatrixOptimizer` is taken for a momentum.
    """
    group = optimizer.param_groups[0]
    if isinstance(optimizer, MatrixOptimizer):
        return OPTIMIZERS["muon"]
    if isinstance(optimizer, torch.optim.SGD):
        return OPTIMIZERS["sgd-momentum" if group["momentum"] else "sgd"]
    known = OPTIMIZERS["adamw-fused" if group.get("fused") else "adamw"]
    return replace(known, states=2 + bool(group.get("amsgrad")), is_foreach=bool(group.get("foreach")))


def matrices_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ids of the parameters that `optimizer` steps matrix by matrix."""
    groups = optimizer.matrix_groups() if isinstance(optimizer, MatrixOptimizer) else []
    return {id(parameter) for group in groups for parameter in group["params"]}


def most_within(timeline: Timeline, phase: str, unit: int) -> Counter[tuple[str, int]]:
    """Returns the bytes by kind and unit at the peak of `unit`'s `phase`, or of the step if there is no such span."""
    spans = [span for span in timeline.spans if (span.lane, span.name, span.unit) == (Lane.COMPUTE, phase, unit)]
    now: Counter[tuple[str, int]] = Counter()
    most, changes = Counter(now), timeline.changes
    ends = [*(change.time for change in changes[1:]), timeline.seconds]
    for change, end in zip(changes, ends, strict=True):
        now[change.kind, change.unit] += change.nbytes
        is_within = any(span.start < end and change.time <= span.end for span in spans)
        if (is_within or not spans) and now.total() > most.total():
            most = Counter(now)
    return +most


# The model as it was before it was sharded

_OURS = {*Unit.ATTRIBUTES, "_compiled_call_impl"}


def plain_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` without sharding: full parameters on the meta device, no wrappers, no hooks.

    No value is read, and the model may be in the middle of a step.

    Raises:
        UnsupportedError: a parameter is also cut over other axes (tensor parallelism), or a module has an attribute
            that cannot be copied, such as a process group.
    """
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in reversed(modules):  # a wrapper's copy is the copy of the module inside, which comes first
        inner = module._modules[WRAPPED] if isinstance(module, FullyShardedDataParallel) else None
        plain = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
        memo[id(module)] = object.__new__(plain) if inner is None else memo[id(inner)]
        memo |= {id(attached): None for attached in Unit.attached_to(module)}
        for tensor in tensors_in(vars(module)):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            continue
        own = {
            name: value
            for name, value in vars(module).items()
            if name not in _OURS and "_hooks" not in name and not isinstance(value, BoundForward)
        }
        try:
            copied_own = copy.deepcopy(own, memo)
        except Exception as error:
            class_name = type(memo[id(module)]).__name__
            raise UnsupportedError(f"a {class_name} of the model holds what cannot be copied: {error}") from error
        vars(memo[id(module)]).update(vars(nn.Module()) | copied_own)
    for parameter in (parameter for unit in Unit.below(model) for parameter in unit.parameters):
        if parameter.unsharded_spec is not None or parameter.restored is not None:
            raise UnsupportedError(f"{parameter.name} is also cut over other axes of ranks, which is not simulated")
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        whole = nn.Parameter(empty, parameter.requires_grad)
        for place in parameter.places:
            if place.module_id in memo:
                vars(memo[place.module_id]).pop(place.attribute, None)
                memo[place.module_id]._parameters[place.attribute] = whole
    copied: nn.Module = memo[id(model)]
    return copied
