"""Adoption: takes changes of a model since it was sharded into its units.

All changes are found, planned, and compared between the ranks, before any is carried out:

    walk      every unit's modules, as when the unit was made: which parameter is registered where now
    compare   names, shapes, dtypes and errors, over the ranks of each mesh
    do        shard new parameters, forget dropped ones, regroup the unit; shards that stay are the same Parameters
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.optim import Optimizer

from sherd.comm.agreement import broadcast_from_rank0, require_alike
from sherd.comm.mesh import DataMesh
from sherd.engine.make.build import borrow, constructions, owners_of, shard
from sherd.engine.make.sharding import ShardingPlan, sharding_plans
from sherd.engine.run.runtime import Runtime, name_units
from sherd.engine.run.unit import Unit
from sherd.engine.state.flat import FlatParameter
from sherd.engine.state.optimizers import News, bring_up_to_date, watcher
from sherd.engine.state.ownership import BorrowedParameter, DiscoveredParameter, ParameterOwnership
from sherd.engine.state.parameter import ParameterPlace, ShardedParameter
from sherd.errors import ModuleError, SherdError, StateError, UnsupportedError, in_short
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name

Key = tuple[int, str]


@dataclass(frozen=True)
class Refreshed:
    """The changes that `sherd.refresh` made, by the names of parameters as seen from the root.

    Args:
        adopted: new parameters, which were sharded.
        dropped: parameters that the model no longer has.
        retied: places that show another place's parameter now, as "head.weight = embed.weight".
        thawed: parameters that are trained now, and were not before.
        frozen: parameters that are not trained now, and were before.
    """

    adopted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    retied: tuple[str, ...] = ()
    thawed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = [f"{change}: {', '.join(names)}" for change, names in vars(self).items() if names]
        return "; ".join(changes) or "nothing has changed"


@dataclass
class _Change:
    """The change of one unit. `kept` are the parameters that it still has, each with its places."""

    unit: Unit
    belongings: ParameterOwnership
    kept: dict[ShardedParameter, list[ParameterPlace]]
    added: list[DiscoveredParameter]
    dropped: list[ShardedParameter]
    retied: list[str]
    thawed: list[ShardedParameter]
    frozen: list[ShardedParameter]
    borrowed: list[BorrowedParameter]
    plans: list[ShardingPlan] = field(default_factory=list)
    tied_owners: list[Unit] = field(default_factory=list)

    @property
    def regroups(self) -> bool:
        return bool(self.added or self.dropped or self.thawed or self.frozen)

    @property
    def borrows_others(self) -> bool:
        """True if the unit uses parameters of other units than before."""
        return set(self.tied_owners) != set(self.unit.tied_owners)

    def plan(self) -> None:
        """Plan the sharding of the unit's new parameters, and find the units that it borrows from.

        Raises:
            UnsupportedError: the unit cannot change this way.
            ModuleError, PlacementError, OwnershipError: as when the unit was made.
        """
        unit = self.unit
        self.tied_owners = owners_of(self.borrowed, unit.mesh)
        altered = [*(each.name for each in self.added), *(each.name for each in self.dropped), *self.retied]
        if self.borrows_others:
            altered += [each.record.name for each in self.borrowed]
        if altered and _is_flat(unit):
            raise UnsupportedError(
                f"refresh: {in_short(altered)} changed in unit {unit.name}, whose parameters are one flat parameter, "
                "and that cannot grow or shrink (requires_grad may change). Wrap with use_orig_params=True; or wrap "
                "what is new by itself, then refresh; or change the model before it is wrapped"
            )
        if unit.gathers_as_one and self.regroups:
            raise UnsupportedError(
                f"refresh: {in_short(altered) or 'requires_grad'} changed in unit {unit.name}, which has a "
                "collective or an all-reduce hook of yours, made for the group it was; set it after the change"
            )
        on_meta = {(each.dtype, each.requires_grad): each.resting.is_meta for each in self.kept}
        for name, new in ((each.name, each.parameter) for each in self.added):
            if on_meta.get((new.dtype, new.requires_grad), new.is_meta) != new.is_meta:
                raise ModuleError(
                    f"refresh: {name} is {'' if new.is_meta else 'not '}on the meta device, the parameters of unit "
                    f"{unit.name} are{' not' if new.is_meta else ''}, and they are to share a buffer; give all of them "
                    "memory and values first"
                )
        request_of = constructions[unit].request_of
        plans = sharding_plans(self.added, unit.streams, request_of, unit.surrounds, unit.precision)
        # Runs of one plan share a buffer. The new ones have plans, and buffers, of their own.
        first = 1 + max((record.plan_id for record in unit.parameters), default=0)
        self.plans = [replace(plan, plan_id=first + plan.plan_id) for plan in plans]

    def described(self) -> list[str]:
        """Returns the changes in words, which must be the same on all ranks."""
        added = [
            f"new {each.name} {tuple(local_part(each.parameter).shape)} {each.parameter.dtype}"
            f"{'' if each.parameter.requires_grad else ' frozen'} in {self.unit.name}"
            for each in self.added
        ]
        dropped = [f"gone {each.name}" for each in self.dropped]
        turned = [f"thawed {each.name}" for each in self.thawed] + [f"frozen {each.name}" for each in self.frozen]
        return added + dropped + [f"tied {each}" for each in self.retied] + turned


def adopt_changes(model: nn.Module, optimizers: Sequence[Optimizer], from_rank0: bool) -> Refreshed:
    """Take all changes below `model`, and in the models that its units are part of, into the units.

    Raises:
        StateError: a forward or backward is under way, gradients wait for a reduction, or copies are lent.
        UnsupportedError: parameters changed in a unit with a flat parameter, or with a collective of the user's.
        ModuleError, PlacementError, OwnershipError: as when the unit was made.
        RanksDifferError: ranks changed the model in different ways. No unit was changed then.
    """
    roots = _roots(model)
    units = list({unit.id: unit for root in roots for unit in name_units(root)}.values())
    for unit in units:
        unit.require_at_rest("refresh")
        for weights, gradients in zip(unit.weights, unit.gradients, strict=True):
            if gradients.has_any or gradients.partial is not None:
                raise StateError(
                    f"refresh: gradients of {weights.group.name} wait for their reduction; call it between steps"
                )
    names = {id(module): plain_name(path) for root in roots for path, module in root.named_modules()}
    gone = _gone(units)
    changes: list[_Change] = []
    error: SherdError | None = None
    try:
        changes = _changes(units, names)
        for change in changes:
            change.plan()
    except SherdError as raised:
        # Kept for `_require_agreement`: the other ranks wait in it for this rank's answer
        # (test_ranks_that_differ_all_raise_the_same).
        error = raised
    _require_agreement(units, changes, error)
    for unit in units:
        runtime = Runtime.over(unit)
        for member in () if runtime is None else runtime.units:
            member.join(None)  # the next forward seals the units that there are then
    if from_rank0:
        for change in changes:
            values = [local_part(each.parameter) for each in change.added if not each.parameter.is_meta]
            broadcast_from_rank0(values, change.unit.mesh, "rank 0's broadcast of new parameters")
    borrowed = {each.record for change in changes for each in change.borrowed}
    dropped = [each for change in changes for each in change.dropped]
    dropped += [each for unit in gone for each in unit.parameters if each not in borrowed]
    adopted = [record for change in changes for record in _carry_out(change)]
    for root in roots:
        name_units(root)
    watcher.sharded_again()
    for number, optimizer in enumerate(optimizers):
        # Only the first optimizer gets the new parameters: two optimizers would step them twice.
        bring_up_to_date(optimizer, () if number else adopted, [each.optimizer_param for each in dropped])
    watcher.announce(
        News(
            frozenset(unit.id for unit in units),
            [weakref.ref(each) for each in adopted],
            [(weakref.ref(local_part(each.optimizer_param)), each.name) for each in dropped],
        )
    )
    return Refreshed(
        tuple(each.name for each in adopted),
        tuple(each.name for each in dropped),
        tuple(name for change in changes for name in change.retied),
        tuple(each.name for change in changes for each in change.thawed),
        tuple(each.name for change in changes for each in change.frozen),
    )


def _roots(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost of `model` and the roots of its units' runtimes: units further out may share parameters."""
    roots = {id(model): model}
    for unit in Unit.below(model):
        runtime = Runtime.over(unit)
        for module in runtime.root.modules if runtime is not None else ():
            roots.setdefault(id(module), module)
    inner = {id(below) for root in roots.values() for below in root.modules() if below is not root}
    return [root for key, root in roots.items() if key not in inner]


def _gone(units: Sequence[Unit]) -> list[Unit]:
    """Returns the units that were sealed with some of `units`, and that no root has any more."""
    known = {unit.id for unit in units}
    runtimes = {id(runtime): runtime for unit in units if (runtime := Runtime.over(unit)) is not None}
    sealed = [unit for runtime in runtimes.values() for unit in runtime.units if unit.id not in runtime.external_units]
    return [unit for unit in dict.fromkeys(sealed) if unit.id not in known]


# What has changed


def _changes(units: Sequence[Unit], names: dict[int, str]) -> list[_Change]:
    walked = [(unit, ParameterOwnership.below(unit.modules, ())) for unit in units]
    was = {place.key: record for unit in units for record in unit.parameters for place in record.places if place.exists}
    now: dict[ShardedParameter, dict[Key, ParameterPlace]] = {}
    for _, belongings in walked:
        for each in belongings.borrowed:
            if not isinstance(each.place.shown, FlatParameter):
                now.setdefault(each.record, {})[each.place.key] = each.place
    new_values: set[int] = set()
    for _, belongings in walked:
        for new in belongings.owned:
            # A Parameter in the place of a shard of this shape is no new parameter: the shard takes its values.
            before = next((was[place.key] for place in new.places if place.key in was), None)
            if before is not None and before.shard.shape == new.parameter.shape:
                new_values.add(id(new.parameter))
                now.setdefault(before, {}).update({place.key: place for place in new.places})
    return [_change_of(unit, belongings, was, now, new_values, names) for unit, belongings in walked]


def _change_of(
    unit: Unit,
    belongings: ParameterOwnership,
    was: dict[Key, ShardedParameter],
    now: dict[ShardedParameter, dict[Key, ParameterPlace]],
    new_values: set[int],
    names: dict[int, str],
) -> _Change:
    ignored = {place.key for place in unit.ignored if place.exists}
    added = [
        replace(each, name=_name_at(each.places[0], names))
        for each in belongings.owned
        if id(each.parameter) not in new_values and all(place.key not in ignored for place in each.places)
    ]
    ignored_now = [place for each in belongings.owned for place in each.places if place.key in ignored]
    kept = {record: list(now[record].values()) for record in unit.parameters if record in now}
    retied = [
        f"{_name_at(place, names)} = {record.name}"
        for record, places in kept.items()
        for place in places
        if was.get(place.key) is not record
    ]
    turned = [
        (record, group.trainable)
        for group in (weights.group for weights in unit.weights)
        for record in group.parameters
        if record in kept and record.requires_grad != group.trainable
    ]
    return _Change(
        unit,
        replace(belongings, ignored=ignored_now),
        kept,
        added,
        [record for record in unit.parameters if record not in kept],
        retied,
        [record for record, was_trained in turned if not was_trained],
        [record for record, was_trained in turned if was_trained],
        [each for each in belongings.borrowed if each.record.owner is not unit],
    )


def _name_at(place: ParameterPlace, names: dict[int, str]) -> str:
    path = names.get(place.module_id, "")
    return f"{path}.{place.attribute}" if path else place.attribute


def _require_agreement(units: Sequence[Unit], changes: Sequence[_Change], error: SherdError | None) -> None:
    """Raise the same error on all ranks if one rank has an error, or ranks differ in their changes."""
    by_mesh: dict[DataMesh, list[str]] = {unit.mesh: [] for unit in units}
    for change in changes if error is None else ():
        by_mesh[change.unit.mesh] += change.described()
    text = [] if error is None else [f"{type(error).__name__}: {error.args[0]}"]
    for mesh, described in by_mesh.items():
        require_alike(mesh, [*described, *text], "what has changed in the model since it was sharded")
    if error is not None:
        raise error


# Doing it


def _is_flat(unit: Unit) -> bool:
    return any(record.flat is not None for record in unit.parameters)


@torch.no_grad()
def _carry_out(change: _Change) -> list[ShardedParameter]:
    """Make the unit fit its modules. Returns the records of the new parameters."""
    unit = change.unit
    for record, places in change.kept.items():
        if record.flat is None:
            record.hang_on(places)
            record.notice_replaced()
    adopted = shard(change.added, change.plans, unit.place)
    if _is_flat(unit):
        if change.regroups:
            unit.regroup()
    elif change.regroups or change.retied or change.borrows_others:
        unit.have([*change.kept, *adopted], change.tied_owners, change.belongings.ignored)
    borrow(change.borrowed)
    constructions[unit].look_after(unit, change.belongings.modules)
    return adopted
