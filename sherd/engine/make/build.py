"""Makes a unit of modules: shards the parameters and installs the hooks. Both front ends call `make_unit`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import iter_modules

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import attributes_of, grad_dtype_of, manage, move_hooks, trace_nothing_in
from sherd.comm.agreement import failing_together, groups_of
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import streams_for
from sherd.engine.between import load
from sherd.engine.make.sharding import ShardingPlan, ShardingRequest, sharding_plans
from sherd.engine.run import hooks, touch
from sherd.engine.run.unit import Unit, meshes
from sherd.engine.run.unmanaged import registrations
from sherd.engine.state.fetching import RestingPlace
from sherd.engine.state.loads import forget_loads, loads_balance, policy_of_next
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.ownership import BorrowedParameter, DiscoveredParameter, ParameterOwnership
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import ModuleError, OwnershipError, PolicyError, in_short
from sherd.policy import Disk, MixedPrecisionPolicy, OffloadPolicy, SavedOnHost, UnitPolicy
from sherd.tensor.gather import shard_of
from sherd.tensor.ragged import as_dtensor
from sherd.tensor.spmd_types import untyped
from sherd.wrap.names import wrapped_by


def make_unit(
    modules: Sequence[nn.Module],
    belongings: ParameterOwnership,
    mesh: DataMesh,
    request_of: Callable[[DiscoveredParameter], ShardingRequest],
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    policy: UnitPolicy,
) -> Unit:
    """Make one unit of `modules` and of their `belongings`, the parameters below them.

    Gradients are divided by the size of `mesh`. Each parameter is sharded over the mesh of its own request.

    Raises:
        ModuleError: a unit around `modules` was made before, and has all their parameters.
        PlacementError: a parameter cannot be cut as asked.
        PolicyError: `precision` has a function that returned a dtype which it may not; or `offload` asks for masters of
            parameters that are not bfloat16, or has parameters on a disk that gather themselves.
        ScratchError: `offload` names a disk that cannot be used.
        OwnershipError: a parameter belongs to a unit on another mesh.
    """
    owners = owners_of(belongings.borrowed, mesh)
    if offload.masters is not None:
        _require_masters_possible(belongings.owned)
    if isinstance(offload.parameters, Disk):
        _require_plain(belongings.owned)
    disks = [each for each in (offload.parameters, offload.optimizer, offload.masters) if isinstance(each, Disk)]
    on_all_ranks = functools.partial(failing_together, groups_of(mesh), "a unit's files") if disks else nullcontext
    with on_all_ranks():
        for disk in disks:
            from sherd.on_disk import vectors_on  # seldom needed, so loaded late: tests/test_storeys.py

            vectors_on(disk)
    _require_something_left(modules, belongings, owners)
    streams = streams_for(mesh.device)
    surrounds = any(Unit.of(below) is not None for module in modules for below in module.modules())
    # If the loads of the units below balance, the units may be a complete model. Then the next unit counts as the first
    # of another model, so that a teacher has the same owners as its student:
    # test_a_model_made_alike_has_the_same_owners.
    closes = surrounds and loads_balance(mesh)
    plans = sharding_plans(belongings.owned, streams, request_of, surrounds, precision)
    nbytes = sum(each.parameter.numel() * each.parameter.dtype.itemsize for each in belongings.owned)
    offload = policy_of_next(offload, nbytes, mesh)
    place = RestingPlace.under(offload, mesh.device)
    records = shard(belongings.owned, plans, place)
    if closes:
        forget_loads(mesh)
    borrow(belongings.borrowed)
    if mesh.comm.encodes_gradients:
        policy = replace(policy, reduce_unused=True)
    with on_all_ranks():
        unit = Unit(modules, records, owners, mesh, streams, precision, place, policy, surrounds, belongings.ignored)
    if offload.activations == "host":
        unit.offload_saved(SavedOnHost(pin_memory=offload.pin_memory))
    hooks.install(unit, modules)
    for each in modules:
        unit.attach_to(each)
    constructions[unit] = construction = Construction(request_of)
    construction.look_after(unit, belongings.modules)
    _hide_from_dynamo()
    meshes.setdefault(id(mesh), mesh)
    registrations.install()
    watcher.install()
    watcher.sharded_again()
    return unit


class Construction:
    """How a unit was made, for parameters and modules that come later: the request for each parameter."""

    def __init__(self, request_of: Callable[[DiscoveredParameter], ShardingRequest]) -> None:
        self.request_of = request_of
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look_after(self, unit: Unit, modules: Sequence[nn.Module]) -> None:
        """Move the buffers of the unit's `modules` to the compute device, hook their loads, hide them from Dynamo.

        `modules` are all of the unit's. Modules that were looked after before are hooked once.
        """
        device = unit.mesh.device
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        holders = [each for each in modules if any(p is not None for p in each._parameters.values())]
        load.install(unit, [each for each in holders if each not in self._hooked])
        touch.install(unit, modules)
        self._hooked.update(holders)
        for each in modules:
            manage(each)


constructions: weakref.WeakKeyDictionary[Unit, Construction] = weakref.WeakKeyDictionary()

LIBRARY = Path(__file__).parents[2]
TRACED = {"api", "codecs", "fsdp1", "uneven", "interop", "memory", "requirements", "wrap", "tools", "train", "cli"}
"""Packages with models of their own, or with functions that call the user's, and what these call."""


@functools.cache
def _hide_from_dynamo() -> None:
    """Keep Dynamo from tracing sherd's own code, which ragged tensors and compiled optimizer steps call."""
    trace_nothing_in(*(f"sherd.{each.name}" for each in iter_modules([str(LIBRARY)]) if each.name not in TRACED))


@torch.no_grad()
def shard(
    parameters: Sequence[DiscoveredParameter], plans: Sequence[ShardingPlan], place: RestingPlace
) -> list[ShardedParameter]:
    """Replace every parameter by its shard, as planned. Returns the records."""
    records = []
    for discovered, plan in zip(parameters, plans, strict=True):
        # On the resting place first: a DTensor keeps the device that it was made on, and takes gradients on no other.
        # Copied, though the group copies it again: a DTensor keeps the offset of the view it was made around and cannot
        # be saved then (test_a_shard_that_went_through_a_file_is_a_free_copy).
        local = place.copy_of(shard_of(plan.data.detach(), plan.cut, plan.mesh.piece))
        shard = nn.Parameter(as_dtensor(local, plan.shard_spec), requires_grad=discovered.parameter.requires_grad)
        record = ShardedParameter(
            discovered.name,
            plan.data.shape,
            plan.data.dtype,
            plan.mesh,
            plan.cut,
            plan.plan_id,
            plan.shard_spec,
            plan.unsharded_spec,
            shard,
            weakref.ref(discovered.holder),
            discovered.places,
            attributes=untyped(attributes_of(discovered.parameter)),
            types=plan.types,
            is_placed_by_default=plan.by_default,
            gradient_owner=plan.gradient_owner,
            param_dtype=plan.param_dtype,
            grad_dtype=grad_dtype_of(discovered.parameter),
        )
        record.begin(plan.data)
        move_hooks(discovered.parameter, shard)
        record.claim(discovered.parameter)
        record.show(shard)
        records.append(record)
    return records


def owners_of(borrowed: Sequence[BorrowedParameter], mesh: DataMesh) -> list[Unit]:
    """Returns the units that own the `borrowed` parameters of a unit on `mesh`.

    Raises:
        OwnershipError: an owner no longer exists, or is on another mesh, where one shard cannot serve both.
    """
    owners: dict[int, Unit] = {}
    for each in borrowed:
        owner = each.record.owner
        if not isinstance(owner, Unit):
            raise OwnershipError(
                f"{each.record.name} was sharded by a unit that no longer exists, so it is never gathered; "
                "build the model again"
            )
        if owner.mesh.mesh != mesh.mesh:
            raise OwnershipError(
                f"{each.record.name} belongs to unit {owner.name}, which shards it over {owner.mesh.mesh}, and is used "
                f"in this unit under {mesh.mesh} (tied weights); shard both units over one mesh, or untie them"
            )
        owners[owner.id] = owner
    return list(owners.values())


def _require_masters_possible(owned: Sequence[DiscoveredParameter]) -> None:
    for name, parameter in ((each.name, each.parameter) for each in owned if each.parameter.requires_grad):
        if parameter.dtype != torch.bfloat16 or hasattr(parameter, "fsdp_pre_all_gather"):
            kind = parameter.dtype if type(parameter) in (nn.Parameter, DTensor) else type(parameter).__name__
            raise PolicyError(
                f"OffloadPolicy(masters=...) keeps float32 masters of bfloat16 parameters, and {name} is {kind}; call "
                "model.to(torch.bfloat16) first, or leave masters out for its unit"
            )


def _require_plain(owned: Sequence[DiscoveredParameter]) -> None:
    for name, parameter in ((each.name, each.parameter) for each in owned):
        if hasattr(parameter, "fsdp_pre_all_gather"):
            raise PolicyError(
                f"OffloadPolicy(parameters=Disk(...)): {name} is a {type(parameter).__name__}, which gathers "
                "itself, and cannot rest in a file; parameters='host' for its unit"
            )


def _require_something_left(
    modules: Sequence[nn.Module], belongings: ParameterOwnership, owners: Sequence[Unit]
) -> None:
    """Raise ModuleError if units were made from the outside in, or a flat parameter would be seen by no optimizer.

    Modules without parameters, or with parameters that are all tied to those of a sibling unit, may become units.
    So may a module whose wrapper was taken off, or that is wrapped again.
    """
    wrapped = [inner for module in modules if (inner := wrapped_by(module)) is not None]
    for owner in owners:
        borrowed = [each.record for each in belongings.borrowed if each.record.owner is owner]
        taken = in_short([record.name for record in borrowed], 4)
        if not owner.modules or any(wrapped_by(each) in wrapped for each in owner.modules):
            if borrowed[0].flat is not None:
                raise ModuleError(
                    f"{taken} are parts of the flat parameter of unit {owner.name}, whose wrapper was taken off or "
                    "wraps the same module: an optimizer of this unit's parameters would not see them. Keep the first "
                    "wrapper, or wrap with use_orig_params=True both times"
                )
            continue
        within = {id(below) for module in owner.modules for below in module.modules()}
        inner = next((each for each in (*modules, *wrapped) if id(each) in within), None)
        if inner is not None and not belongings.owned:
            raise ModuleError(
                f"a {type(inner).__name__} cannot become a unit: unit {owner.name}, around it, was made before and has "
                f"taken all of its parameters ({taken}). Go from the inside out: fully_shard, or the "
                "wrapper, on the blocks first and on the model last; build the model again"
            )


def borrow(borrowed: Sequence[BorrowedParameter]) -> None:
    """Register other units' parameters at the places where this unit's modules use them too."""
    for each in borrowed:
        if any(place.key == each.place.key for place in each.record.places):
            continue  # both units have the module: the parameter is registered already
        each.record.places.append(each.place)
        each.place.show(each.record.shard)
        each.place.register(each.record.flat is None)
