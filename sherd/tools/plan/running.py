"""A training that runs, read for the simulator: what a step takes, with its own settings and with others."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sherd.api.blocks import repeated_blocks
from sherd.api.module import FSDPModule
from sherd.engine import BoundForward, Unit
from sherd.errors import StateError, UnsupportedError
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.optim.matrix import MatrixOptimizer
from sherd.schedule.state import Keep
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.axes import ModelLayout
from sherd.tools.plan.plan import num_samples, resized_batch
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.plan.sharding import sharded_of, shares_of_blocks
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.segments import OptimizerPart
from sherd.tools.simulate.settings import SHARES, Mesh, Settings, Space
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer, Sharded
from sherd.tools.simulate.timeline import Lane, Timeline
from sherd.tools.simulate.work import Enter, Work
from sherd.wrap.names import WRAPPED, plain_name

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
            offload=sharded.is_offloaded,
            prefetch=max(sharded.limits.forward_depth, sharded.limits.backward_depth),
            micro_batch=first,
            micro_batches=seen.micro_batches,
        )
        fixed = {"mesh", "strategy", "placement", "wrapping"}
        fixed |= {"offload"} if own.device.type == "cpu" or sharded.is_offloaded else set()
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
    """Returns a copy of `model` without sharding: whole parameters on the meta device, no wrappers, no hooks.

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
