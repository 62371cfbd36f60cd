"""A sharded model, read for the simulator: what `fully_shard` has made of it, in numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sherd.engine import ShardedParameter, Unit, sizes_of
from sherd.memory.report import batch_bytes_of, state_for
from sherd.schedule.moments import Arrival
from sherd.tensor.ragged import local_part
from sherd.tools.plan.collectives import group_of
from sherd.tools.simulate.sharded import Optimizer, Sharded, Traffic
from sherd.tools.simulate.sharded import Unit as PlayedUnit
from sherd.tools.simulate.work import Work
from sherd.wrap.names import plain_name


def sharded_of(model: nn.Module, work: Work, optimizer: Optimizer) -> Sharded:
    """Returns what the simulator knows of `model`, the root that `fully_shard` was called on last.

    Args:
        model: sharded over ranks that need not exist, on any device.
        work: a micro-batch of the same model before it was sharded.
        optimizer: steps all trainable parameters.
    """
    units = Unit.below(model)
    state = state_for(model, units)
    names = {id(module): plain_name(name) for name, module in model.named_modules(remove_duplicate=False)}
    modules = {module.name: number for number, module in enumerate(work.modules)}
    parameters = {parameter.name: number for number, parameter in enumerate(work.parameters)}
    return Sharded(
        tuple(_played(unit, names, modules) for unit in units),
        state.specs,
        state.limits,
        batch_bytes_of(units),
        {
            parameters[_name(each, names)]: Arrival(number, group, index)
            for number, unit in enumerate(units)
            for group, weights in enumerate(unit.weights)
            for index, each in enumerate(weights.group.trained)
        },
        optimizer,
        any(weights.group.is_offloaded for unit in units for weights in unit.weights),
    )


def _played(unit: Unit, names: dict[int, str], modules: dict[str, int]) -> PlayedUnit:
    own = [names[id(module)] for module in unit.modules]
    return PlayedUnit(
        name_of(unit, names),
        unit.class_name,
        sum(each.shape.numel() for each in unit.parameters),
        tuple(modules[name] for name in own),
        tuple(sizes_of(unit)),
        tuple(traffic_of(unit)),
        stepped(unit),
    )


def name_of(unit: Unit, names: dict[int, str]) -> str:
    """Returns the name of `unit`, where modules have `names` by their ids."""
    return ", ".join(names[id(module)] for module in unit.modules if id(module) in names) or unit.class_name


def stepped(unit: Unit) -> tuple[int, ...]:
    """Returns the bytes of each shard of `unit` that an optimizer steps."""
    groups = [weights.group for weights in unit.weights if weights.group.trained]
    return tuple(local_part(each.parameter).nbytes for group in groups for each in group.optimizer_params)


def traffic_of(unit: Unit) -> Iterator[Traffic]:
    """Yields the bytes of the collectives of each group of `unit`."""
    for weights in unit.weights:
        group, plan = weights.group, weights.plan
        mesh = group.mesh
        reduced = sum(plan.reduced_by_piece) * group.reduce_dtype.itemsize if group.trained else 0
        yield Traffic(
            gathered=0 if plan.is_never_gathered else group.packing.gathered_numel * group.compute_dtype.itemsize,
            reduced=reduced if mesh.num_shards > 1 else 0,
            all_reduced=reduced // mesh.num_shards if mesh.num_replicas > 1 else 0,
            owned=group.shard_buffer.nbytes,
            shard=group_of(mesh.shard_group),
            replicate=group_of(mesh.replicate_group),
        )


def _name(parameter: ShardedParameter, names: dict[int, str]) -> str:
    """Returns the name of a parameter as the model has it that was not sharded."""
    place = parameter.places[0]
    module = names[place.module_id]
    return f"{module}.{place.attribute}" if module else place.attribute
