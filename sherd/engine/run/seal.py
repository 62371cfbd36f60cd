"""Sealing: a root module gets a runtime, for all units that run together, when its first forward begins.

On a module there is one private key for its unit and, on a root, one for its runtime; both are read here only.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import outside_transforms, say_fully_sharded, write_into
from sherd.comm.agreement import in_short
from sherd.engine.moves.selfgather import require_can_gather_itself
from sherd.engine.run.runtime import Runtime, runtime_over
from sherd.engine.run.unit import Unit
from sherd.engine.run.unmanaged import Unmanaged
from sherd.engine.state.loads import forget_loads
from sherd.engine.state.ownership import require_not_torchs
from sherd.engine.state.parameter import plain_name
from sherd.errors import OwnershipError, StateError

UNIT = "_sherd_unit"
RUNTIME = "_sherd_runtime"
FRONT_END = "_sherd_state"
"""The attribute of a module for what its front end keeps beside the unit."""


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` was made into, alone or in a list."""
    unit = module.__dict__.get(UNIT)
    return unit if isinstance(unit, Unit) else None


def units_below(root: nn.Module) -> list[Unit]:
    """The units at and below `root`, each once, in the order of `named_modules`, as a runtime has them."""
    # Not by `modules()`, whose generators go through all modules above for each one.
    found: dict[int, Unit] = {}
    ahead: list[nn.Module | None] = [root]
    passed: set[nn.Module] = set()
    while ahead:
        module = ahead.pop()
        if module is not None and module not in passed:
            passed.add(module)
            ahead += reversed(module._modules.values())
            if UNIT in module.__dict__ and (unit := unit_of(module)) is not None:
                found[unit.id] = unit
    return list(found.values())


def attach(module: nn.Module, unit: Unit) -> None:
    """Make `unit` the unit of `module`, which torch's DDP leaves alone then; the module keeps it alive."""
    write_into(module, UNIT, unit)
    say_fully_sharded(module)


def attached_to(module: nn.Module) -> list[object]:
    """Returns what sherd has hung on `module`: its unit, its runtime, its front end's record."""
    return [module.__dict__[key] for key in (UNIT, RUNTIME, FRONT_END) if key in module.__dict__]


def runtime_of(unit: Unit, module: nn.Module) -> Runtime:
    """The runtime that `unit` is sealed into; if there is none yet, `module`, or the unit's first module where that
    is not one of them, becomes a root."""
    runtime = runtime_over(unit)
    if runtime is not None and not (runtime.is_idle and unit.id in runtime.guests):
        return runtime
    # One inside of the unit's modules may be called by itself (`engine/run/touch.py`).
    root = module if unit_of(module) is unit else unit.modules[0]
    with outside_transforms():  # buffers that are made anew would be of the transform's level
        return seal(root)


def seal(root: nn.Module) -> Runtime:
    """Take every unit at and below `root` into one runtime, with names as seen from there; also those elsewhere that
    own a parameter which one of them uses, where a part of a model runs before its root ever has.

    Raises:
        ModuleError: torch's own FSDP has a module below `root`.
        StateError: a unit is at work in another runtime, or parameters still have no data (meta device).
        OwnershipError: a unit belongs to another root, or a parameter was made tensor parallel after it was sharded.
    """
    below = units_below(root)
    ids = {unit.id for unit in below}
    owners = {owner.id: owner for unit in below for owner in unit.companions if owner.id not in ids}
    units = [*below, *owners.values()]
    for unit in units:
        earlier = runtime_over(unit)
        if earlier is not None and unit in below and earlier.root not in below and unit.id not in earlier.guests:
            raise OwnershipError(
                f"unit {unit.name} has run below the root {earlier.root.name}, and cannot be taken under a second one, "
                f"{type(root).__name__}: fully_shard a module that has both, and run its forward first; or delete the "
                "first root, if it is used no more"
            )
        if earlier is not None and not earlier.is_idle:
            raise StateError(
                f"unit {unit.name} is still at work below {earlier.root.name}, so it cannot be taken under a new root "
                f"{type(root).__name__}; finish that forward or backward first, or call reset_iter_state() on it"
            )
    name_units(root)
    for unit in units:
        if unit.shards.on_meta:
            unit.notice_replaced()
            unit.rebind()  # `to_empty` may have been called on each module by itself
    _require_data(units)
    _require_own_meshes(units)
    _require_shards_can_gather_themselves(units)
    runtime = Runtime(units, Unmanaged(root, units), guests=owners)
    for unit in units:
        unit.notice_moved()
        if not unit.shards.are_in_buffer:
            unit.regroup()
        unit.join(runtime)
        forget_loads(unit.mesh)
    write_into(root, RUNTIME, runtime)
    return runtime


def name_units(root: nn.Module) -> list[Unit]:
    """Give every unit below `root`, and the parameters that are used there, names as seen from there. Returns the
    units, each once.

    Raises:
        ModuleError: torch's own FSDP has a module below `root`.
    """
    names: dict[int, tuple[Unit, list[str]]] = {}
    module_names: dict[int, str] = {}
    for path, module in root.named_modules():
        name = plain_name(path)
        unit = unit_of(module)
        if unit is None:
            require_not_torchs(path, module)
        else:
            names.setdefault(unit.id, (unit, []))[1].append(name or unit.class_name)
        module_names[id(module)] = name
    for unit, unit_names in names.values():
        unit.rename(", ".join(unit_names), module_names)
    below = [unit for unit, _ in names.values()]
    for owner in {owner for unit in below for owner in unit.companions}.difference(below):
        owner.rename(owner.name, module_names)
    return below


def _require_data(units: list[Unit]) -> None:
    missing = [f"{name} (unit {unit.name})" for unit in units for name in unit.shards.on_meta]
    if missing:
        raise StateError(
            f"parameters are still on the meta device: {in_short(missing)}. Give them memory and values before the "
            "first forward: model.to_empty(device=...), then each module's reset_parameters(), or load a state dict"
        )


def _require_shards_can_gather_themselves(units: list[Unit]) -> None:
    """Raise if a shard was given an all-gather of its own, after it was cut in a way that does not allow for one."""
    for record in (each for unit in units for each in unit.parameters):
        require_can_gather_itself(record.name, record.resting, record.cut, record.mesh)


def _require_own_meshes(units: list[Unit]) -> None:
    """Raise if a DTensor on another mesh hangs where a shard was: what is gathered would take its place again, without
    a word, and the module computes for tensor parallelism."""
    for unit in units:
        for record in unit.parameters:
            for place in record.places:
                shown = place.shown
                if isinstance(shown, DTensor) and shown.device_mesh != record.shard_spec.mesh:
                    raise OwnershipError(
                        f"{record.name} (unit {unit.name}): a DTensor on {shown.device_mesh} was put in its place "
                        f"after it was sharded over {record.shard_spec.mesh}; make modules tensor parallel first "
                        "(parallelize_module), then fully_shard: build the model anew, in that order"
                    )
