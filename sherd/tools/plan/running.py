"""A training that runs, read for the simulator: what a step of it takes, now and with settings that are changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sherd.api.blocks import repeated_blocks
from sherd.engine import Unit
from sherd.errors import StateError
from sherd.schedule.state import Keep
from sherd.tensor.structures import tensors_in
from sherd.tools.plan.axes import Layout
from sherd.tools.plan.blocks import shares_of_blocks
from sherd.tools.plan.plain import plain_copy
from sherd.tools.plan.plan import num_samples, resized_batch
from sherd.tools.plan.planner import Planner, Training
from sherd.tools.plan.reading import own_or_usual_loss
from sherd.tools.plan.sharding import sharded_of
from sherd.tools.simulate.cluster import Cluster
from sherd.tools.simulate.settings import SHARES, Mesh, Settings, Space
from sherd.tools.simulate.sharded import OPTIMIZERS, Optimizer, Sharded
from sherd.tools.simulate.timeline import Lane, Timeline
from sherd.tools.simulate.work import Enter, Work
from sherd.wrap.names import plain_name

LossOfOutput = Callable[[Any], Tensor]
"""Of what the model returns, a scalar: the loss."""


class Forwards:
    """Hooks that see the forwards of a training: what the last one was given, as (args, kwargs) on the meta device, and
    how many there are in a step."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.micro_batches, self._number = 1, 0
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []

    def begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a forward, before it."""
        if torch.is_grad_enabled():
            self._number += 1
            self.micro_batches = max(self.micro_batches, self._number)
            shapes = [(each.shape, each.dtype) for each in tensors_in((args, kwargs))]
            if shapes != self._shapes:
                self._shapes, self.batch = shapes, resized_batch((args, kwargs), 0, 0)

    def stepped(self, *_: object) -> None:
        """Note a step of the optimizer."""
        self._number = 0


class Running(Planner):
    """Predicts steps of a sharded model as it is, at any moment, without values and without other ranks.

    `settings` are its own, `space` the changes that need no other sharding.

    Raises:
        StateError: the model has not run yet. UnsupportedError: it is also cut over other axes of ranks.
        InputError: it does not run without values.
    """

    has_holes = False
    """Which there are depends on all that the process has allocated so far. What is free tells what they take."""

    def __init__(
        self, model: nn.Module, stepper: torch.optim.Optimizer, seen: Forwards, loss: LossOfOutput | None, on: Cluster
    ) -> None:
        units = Unit.below(model)
        meshes = {each.mesh for unit in units for each in unit.parameters if each.mesh.num_shards > 1}
        if seen.batch is None or any("shard_transport" not in vars(mesh) for mesh in meshes):
            raise StateError("the model has not run in here yet")  # and to make a transport ranks would have to meet
        own, first = units[0].mesh, num_samples(seen.batch)
        training = Training(
            plain_copy(model),
            lambda size: resized_batch(seen.batch, first, size),
            Layout(partial(_loss_of, given=loss)),
            optimizer_of(stepper),
            units[0].precision.param_dtype,
            samples=first,
        )
        super().__init__(training, on)
        work = self.read(first)
        sharded = self._as_it_is = sharded_of(model, work, training.optimizer)
        self._is_checkpointed = any(isinstance(event, Enter) and event.again for event in work.events)
        self.settings = Settings(
            Mesh(own.num_shards, own.num_replicas),
            reshard=all(each.after_forward is not Keep.ALWAYS for each in sharded.specs[1:]),
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
        modules = tuple(replace(each, name=plain_name(each.name)) for each in work.modules)
        parameters = tuple(replace(each, name=plain_name(each.name)) for each in work.parameters)
        return replace(work, modules=modules, parameters=parameters)

    def _work_of(self, micro_batch: int, mesh: Mesh, checkpointing: float, recompute: str) -> Work:
        return super()._work_of(micro_batch, mesh, 0.0 if self._is_checkpointed else checkpointing, recompute)

    def _shard_once(self, settings: Settings) -> Sharded:
        sharded, specs, prefetch = self._as_it_is, self._as_it_is.specs, settings.prefetch
        if settings.reshard != self.settings.reshard:
            kept = Keep.NOTHING if settings.reshard else Keep.ALWAYS
            specs = (specs[0], *(replace(each, after_forward=kept) for each in specs[1:]))
        limits = replace(sharded.limits, forward_depth=prefetch, backward_depth=prefetch)
        return replace(sharded, specs=specs, limits=limits if prefetch != self.settings.prefetch else sharded.limits)


def _loss_of(model: nn.Module, batch: Any, given: LossOfOutput | None) -> Tensor:
    def called(args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return given(called(*batch)) if given is not None else own_or_usual_loss(cast(nn.Module, called), batch)


def optimizer_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns what the simulator knows of `optimizer`. One that is neither SGD nor Adam is taken for AdamW."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        return OPTIMIZERS["sgd-momentum" if group["momentum"] else "sgd"]
    known = OPTIMIZERS["adamw-fused" if group.get("fused") else "adamw"]
    return replace(known, states=2 + bool(group.get("amsgrad")), is_foreach=bool(group.get("foreach")))


def most_within(timeline: Timeline, phase: str, unit: int) -> Counter[tuple[str, int]]:
    """Returns the bytes by kind and unit where there are most while `unit` is in `phase`, or in the step, if it never
    is."""
    spans = [each for each in timeline.spans if (each.lane, each.name, each.unit) == (Lane.COMPUTE, phase, unit)]
    now: Counter[tuple[str, int]] = Counter()
    most, changes = Counter(now), timeline.changes
    for change, end in zip(changes, [*(each.time for each in changes[1:]), timeline.seconds], strict=True):
        now[change.kind, change.unit] += change.nbytes
        is_within = any(each.start < end and change.time <= each.end for each in spans)
        if (is_within or not spans) and now.total() > most.total():
            most = Counter(now)
    return +most
