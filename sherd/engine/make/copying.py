"""`copy.deepcopy` of modules with units in them: the copy has units, hooks and shards of its own, by the same policies.

Python copies the modules by its usual walk. The walk's memo holds stand-ins for objects that must not be copied by it:
shards, which become new Parameters on copied memory, and units, which are made again afterwards.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from sherd._torch import spec_of, write_into
from sherd.engine.make.build import Construction, borrow, constructions
from sherd.engine.run import hooks
from sherd.engine.run.unit import Unit
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.ownership import ParameterOwnership
from sherd.engine.state.parameter import as_sharded
from sherd.errors import ModuleError
from sherd.tensor.ragged import as_dtensor

Memo = dict[Any, Any]

_WALKING = "sherd: a walk is under way"
"""A key in a memo: the modules of the units are being copied now, as any other module."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def deep_copied(module: nn.Module, memo: Memo, finish: Callable[[Unit, Unit, Memo], None] | None = None) -> nn.Module:
    """Returns a deep copy of `module`, which is a unit. `finish(old, new, memo)` does the front end's part for a unit.

    Raises:
        ModuleError: a unit has a flat parameter, or has modules, or uses parameters, outside of what is copied.
        StateError: inside an unshard context, or in the middle of a forward or backward.
    """
    if _WALKING in memo:
        # The walk has come to a unit, whose class copies itself by this function. `copy.deepcopy` would call it again,
        # so the module is copied by hand.
        copied = object.__new__(type(module))
        memo[id(module)] = copied
        copied.__setstate__(copy.deepcopy(object.__reduce_ex__(module, 4)[2], memo))
        return copied
    units, tops = _closed(module)
    for unit in units:
        _prepare(unit, memo)
    for unit in units:
        for owner in unit.tied_owners:
            if owner not in units and id(owner) not in memo:
                raise ModuleError(
                    f"{unit.class_name} {unit.name} cannot be deep-copied by itself: it uses parameters of unit "
                    f"{owner.name} (tied weights), which would not be copied; copy the model that has both"
                )
    modules = list(dict.fromkeys(below for top in tops for below in top.modules()))
    memo |= {id(each): object() for below in modules for each in Unit.attached_to(below)}
    memo[_WALKING] = True
    try:
        for top in tops:
            copy.deepcopy(top, memo)
    finally:
        del memo[_WALKING]
    for registered in (getattr(memo[id(old)], name) for old in modules for name in _HOOKS):
        for key, hook in list(registered.items()):
            # torch wraps the pre-hooks of `load_state_dict` in an object that has the hook as `.hook`.
            if isinstance(getattr(hook, "hook", hook), hooks.Eager):  # of the unit that was copied
                del registered[key]
    for unit in units:
        _remake(unit, memo)
    ids = {unit.id: memo[id(unit)].id for unit in units}
    for unit in units:
        new = memo[id(unit)]
        belongings = ParameterOwnership.below(new.modules, ())
        borrow(belongings.borrowed)
        if unit.tied_owners:
            new.have(new.parameters, [memo[id(owner)] for owner in unit.tied_owners], new.ignored)
        new.change(
            accumulation=None,
            when_reduced=None,
            forward_prefetch=_numbered(unit.policy.forward_prefetch, ids),
            backward_prefetch=_numbered(unit.policy.backward_prefetch, ids),
        )
        constructions[new].look_after(new, belongings.modules)
        if finish is not None:
            finish(unit, new, memo)
    watcher.sharded_again()
    return memo[id(module)]  # type: ignore[no-any-return]


def _numbered(unit_ids: tuple[int, ...] | None, ids: dict[int, int]) -> tuple[int, ...] | None:
    return None if unit_ids is None else tuple(ids[each] for each in unit_ids if each in ids)


def _closed(module: nn.Module) -> tuple[list[Unit], list[nn.Module]]:
    """Returns the units below `module`, and the modules to copy: `module`, and the other modules of those units."""
    tops = [module]
    while True:
        units = list({unit.id: unit for top in tops for unit in Unit.below(top)}.values())
        covered = {id(below) for top in tops for below in top.modules()}
        missing = [each for unit in units for each in unit.modules if id(each) not in covered]
        if not missing:
            return units, tops
        tops.append(missing[0])


def _prepare(unit: Unit, memo: Memo) -> None:
    """Put copies of the unit's shards into the memo."""
    flat = [record.name for record in unit.parameters if record.flat is not None]
    if flat:
        raise ModuleError(
            f"{unit.class_name} {unit.name} cannot be deep-copied: its parameters are one flat parameter. Wrap with "
            "use_orig_params=True; or build a second model and load this one's state_dict()"
        )
    unit.require_at_rest("deepcopy")
    for record in unit.parameters:
        shard = as_dtensor(unit.place.copy_of(record.local), spec_of(as_sharded(record.shard)))
        memo[id(record.shard)] = nn.Parameter(shard, requires_grad=record.requires_grad)


def _remake(unit: Unit, memo: Memo) -> None:
    """Make a unit of the copies of `unit`'s modules, and put it into the memo."""
    modules = [memo[id(module)] for module in unit.modules]
    records, meshes = [], {mesh: mesh.of_copy() for mesh in unit.meshes}
    for record in unit.parameters:
        shard = memo[id(record.shard)]
        copied = replace(
            record,
            shard=shard,
            mesh=meshes[record.mesh],
            holder=weakref.ref(memo.get(id(record.holder()), modules[0])),
            places=[place for each in record.places if (place := each.on_copy(memo)) is not None],
            attributes=copy.deepcopy(record.attributes, memo),
            _owner=None,
            _taken=weakref.WeakValueDictionary(),
        )
        copied.claim(shard)
        if record.masters is not None:
            copied.have_masters(*record.masters)
        records.append(copied)
    ignored = [place for each in unit.ignored if (place := each.on_copy(memo)) is not None]
    new = Unit(
        modules,
        records,
        tied_owners=(),
        mesh=meshes[unit.mesh],
        streams=unit.streams,
        precision=unit.precision,
        place=unit.place,
        policy=unit.policy,
        surrounds=unit.surrounds,
        ignored=ignored,
    )
    new.backward.offload_saved(unit.backward.offload)
    memo[id(unit)] = new
    constructions[new] = Construction(constructions[unit].request_of)
    hooks.install(new, modules)
    for old, each in zip(unit.modules, modules, strict=True):
        new.attach_to(each)
        for name, value in vars(old).items():
            if isinstance(value, hooks.BoundForward):
                write_into(each, name, value.of_copy(new, each))
