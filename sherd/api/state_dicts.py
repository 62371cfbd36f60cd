"""The hooks around `state_dict()` and `load_state_dict()` of a wrapper.

Both methods go through nn.Module's own machinery, which finds shards where parameters are registered. Around it:

    before      parameters of a unit with a flat parameter are registered under their own names; for a load, clean names
                become the modules' paths, and legacy values DTensors or whole tensors
    after       paths become clean names, and shards become the kind that was asked for (`state_dict_type.py`); the flat
                parameter is registered again

`sherd/engine/between/load.py` cuts whole tensors, and shards of other layouts, on the way in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    asked_by_checkpointing,
    full_of_sharded_tensor,
    is_sharded_tensor,
    local_tensor,
    spec_of,
)
from sherd.api.extensions import has_own
from sherd.api.fsdp1 import ShardingStrategy, devices_here
from sherd.api.state_dict_type import ShardedForm, StateDict, StateDictType
from sherd.api.wrapper_state import WrapperState, find_state, state_of
from sherd.checkpoint.by_parameter import show_parameters_to_checkpointing
from sherd.checkpoint.relayout import around, full_of, lies_as, on_mesh_device
from sherd.comm.mesh import permuted
from sherd.engine import FlatParameter, ShardedParameter, Unit, UnshardedCopies
from sherd.errors import PlacementError
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, local_part
from sherd.wrap.names import WRAPPED, plain_name

FLAT_PARAM = "_flat_param"
"""The name of a flat parameter, in its wrapper and in a local state dict."""


def install(wrapper: nn.Module) -> None:
    """Register the hooks by which `wrapper` gives and takes state dicts."""
    wrapper.register_state_dict_pre_hook(_before_save)
    wrapper.register_state_dict_post_hook(_after_save)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


# What belongs to one wrapper


@dataclass(frozen=True, slots=True)
class _Contents:
    """The part of a state dict that is not a nested wrapper's: parameters by key, and the original dtype of buffers."""

    parameters: dict[str, ShardedParameter]
    buffers: dict[str, torch.dtype | None]

    @classmethod
    def of(cls, wrapper: nn.Module, prefix: str) -> _Contents:
        state = state_of(wrapper)
        hanging = {
            (place.module_id, place.attribute): record
            for unit in (state.unit, *state.unit.companions)
            for record in unit.parameters
            for place in record.places
        }
        found = cls({}, {})
        for path, module in _own_modules(wrapper, prefix):
            for name in module._parameters:
                record = hanging.get((id(module), name))
                if record is not None:
                    found.parameters[path + name] = record
            for name in module._buffers:
                found.buffers[path + name] = state.buffer_dtypes.get((module, name))
        return found


def _own_modules(wrapper: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Returns the modules below `wrapper` that are in no nested wrapper, each with the prefix of its keys. A module
    that occurs in several places is returned once for each of them."""
    stack = [("", wrapper)]
    while stack:
        path, module = stack.pop()
        yield prefix + plain_name(path), module
        for name, child in module._modules.items():
            if child is not None and find_state(child) is None:
                stack.append((f"{path}{name}.", child))


# Saving


def _before_save(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    state_of(wrapper).show_names()


@torch.no_grad()
def _after_save(wrapper: nn.Module, state_dict: StateDict, prefix: str, local_metadata: StateDict) -> None:
    """Give the keys clean names and the values the kind that was asked for."""
    _strip(state_dict, prefix)
    state, contents = state_of(wrapper), _Contents.of(wrapper, prefix)
    unit, config = state.unit, state.settings.state_dict_config
    _keep_lent_shards(state_dict, contents)
    if asked_by_checkpointing():
        # It gathers or offloads by itself what it is given; told nothing, it would be given whole tensors.
        return
    kind = _kind_of(state)
    assert config is not None, "a wrapper has a config"
    hidden: set[str] = set()
    if kind is StateDictType.FULL_STATE_DICT:
        shown = not _lends_elsewhere(unit) and (not config._on_rank0_only or dist.get_rank(state.process_group) == 0)
        _put_full(state_dict, state, contents, shown, config.offload_to_cpu)
        hidden = set() if shown else {*contents.parameters, *contents.buffers}
    elif kind is StateDictType.LOCAL_STATE_DICT:
        hidden = _put_flat(state_dict, unit, contents, prefix, local_metadata)
    elif config._wanted is not ShardedForm.RUNS:
        _put_rows(state_dict, state, contents, config._wanted, config.offload_to_cpu)
    for key in hidden:
        state_dict.pop(key, None)
    _finish_buffers(state_dict, contents, kind)
    if config.offload_to_cpu:
        _bring_to_host(state_dict, unit, contents, prefix)


def _strip(state_dict: StateDict, prefix: str) -> None:
    """Take the wrapped module's name out of the keys that start with `prefix`. The order stays, as they are the last
    keys by now."""
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        state_dict[prefix + key[len(inner) :] if key.startswith(inner) else key] = value
    # Modules that look at versions find them under both names: the wrapper's, when it loads, and the user's own.
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for path in [path for path in metadata if f"{path}.".startswith(inner)]:
            metadata.setdefault(plain_name(path), metadata[path])


def _kind_of(state: WrapperState) -> StateDictType:
    """Returns the kind that was asked for, or a full one where nothing is sharded, as in FSDP1."""
    kind = state.settings.state_dict_type
    assert kind is not None, "a wrapper has a kind"
    if kind is not StateDictType.FULL_STATE_DICT and state.choices.strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"unit {state.unit.name} is NO_SHARD, so a full state dict is given, though {kind.name} was asked for",
            stacklevel=4,
        )
        return StateDictType.FULL_STATE_DICT
    return kind


def _lends_elsewhere(unit: Unit) -> bool:
    """Returns whether the unsharded copies are on rank 0 only, and this is another rank."""
    return unit.lent is not None and bool(unit.parameters) and all(each.lent is None for each in unit.parameters)


def _put_full(state_dict: StateDict, state: WrapperState, contents: _Contents, shown: bool, on_host: bool) -> None:
    """Put unsharded tensors in the place of shards. Collective over the shard axis and the axes of tensor parallelism,
    unless a user works with unsharded copies already."""
    fulls = _unsharded_copies(state.unit, contents, shown, on_host)
    if has_own(state.extensions, "all_gather_dtensor") and state.unit.lent is None:
        for record in state.extended:
            gathered = _gathered(state, record, around(record.local.detach(), record.shard_spec))
            fulls.update({record: gathered} if shown else {})
    plain = {each: full_of(its) if isinstance(its, DTensor) else its for each, its in fulls.items()}
    _put(state_dict, contents, plain)


def _put(state_dict: StateDict, contents: _Contents, values: Mapping[ShardedParameter, object]) -> None:
    """Put the value of each parameter under all its names."""
    for key, record in contents.parameters.items():
        if key in state_dict and record in values:
            state_dict[key] = values[record]


def _gathered(state: WrapperState, record: ShardedParameter, shards: DTensor) -> torch.Tensor:
    """Returns a tensor-parallel parameter, or a value for it, gathered over the data-parallel axes alone."""
    part = state.extensions.all_gather_dtensor(shards, record.shard_spec.mesh)
    return state.extensions.post_unflatten_transform(part, state.extended[record])


def _unsharded_copies(
    unit: Unit, contents: _Contents, shown: bool, on_host: bool
) -> dict[ShardedParameter, torch.Tensor]:
    if unit.lent is None:
        fulls = UnshardedCopies.of(unit, shown, on_host)
    else:
        fulls = {each: each.lent.detach().clone() for each in unit.parameters if each.lent is not None}
    for record in dict.fromkeys(contents.parameters.values()):
        if record.owner is not unit:
            # It belongs to another wrapper and is used here too. All ranks gather these in the same order.
            shard = record.shard
            assert isinstance(shard, DTensor), "what the optimizer owns is a DTensor"
            fulls[record] = full_of(shard) if record.lent is None else record.lent.detach().clone()
    return fulls


def _keep_lent_shards(state_dict: StateDict, contents: _Contents) -> None:
    """Put this rank's parts of unsharded copies in the place of shards, whose values may be out of date meanwhile."""
    for key, record in contents.parameters.items():
        if record.lent is not None and key in state_dict:
            part = record.part_of(local_part(record.lent)).detach().clone()
            state_dict[key] = as_dtensor(part, record.shard_spec)


def _flat_parameter(unit: Unit) -> FlatParameter | None:
    """Returns the unit's flat parameter, if it has one."""
    owned = unit.parameters[0].optimizer_param if unit.parameters else None
    return owned if isinstance(owned, FlatParameter) else None


def _put_flat(state_dict: StateDict, unit: Unit, contents: _Contents, prefix: str, metadata: StateDict) -> set[str]:
    """Put the flat parameter, if the unit has one, before the unit's other keys, and its shapes into the `metadata`.

    Returns:
        The keys of the parameters that it stands for.
    """
    flat = _flat_parameter(unit)
    if flat is None:
        return set()
    after = [(key, state_dict.pop(key)) for key in list(state_dict) if key.startswith(prefix)]
    state_dict[prefix + FLAT_PARAM] = as_dtensor(local_tensor(flat).detach(), spec_of(flat))
    state_dict.update(after)
    metadata[FLAT_PARAM] = flat.shapes
    return {key for key, record in contents.parameters.items() if record.flat is not None}


def _put_rows(
    state_dict: StateDict, state: WrapperState, contents: _Contents, form: ShardedForm, on_host: bool
) -> None:
    """Put rows of each parameter, cut as `torch.chunk` does, in the place of shards. Collective over the shard axis."""
    mesh, extensions = state.unit.mesh, state.extensions
    assert mesh.shard_axis is not None and mesh.shard_group is not None, "a wrapper that is sharded has a shard axis"
    fulls = _unsharded_copies(state.unit, contents, True, on_host)
    rows: Mapping[ShardedParameter, object]
    if form is ShardedForm.SHARDED_TENSOR:
        ranks = mesh.shard_rank, mesh.num_shards, devices_here(), mesh.shard_group
        rows = {record: extensions.chunk_tensor(full, *ranks) for record, full in fulls.items()}
    else:
        shard_last = mesh.shard_axis == mesh.mesh.ndim - 1
        rows_over = mesh.mesh if shard_last else permuted(mesh.mesh, (1 - mesh.shard_axis, mesh.shard_axis))
        rows = {record: extensions.chunk_dtensor(full, mesh.shard_rank, rows_over) for record, full in fulls.items()}
    _put(state_dict, contents, rows)


def _finish_buffers(state_dict: StateDict, contents: _Contents, kind: StateDictType) -> None:
    """Cast buffers back to the dtype that the user's model has them in, unless the state dict is a local one."""
    if kind is StateDictType.LOCAL_STATE_DICT:
        return
    for key, dtype in contents.buffers.items():
        if dtype is not None and key in state_dict:
            state_dict[key] = state_dict[key].to(dtype)


def _bring_to_host(state_dict: StateDict, unit: Unit, contents: _Contents, prefix: str) -> None:
    for key in (*contents.parameters, *contents.buffers, prefix + FLAT_PARAM):
        value: object = state_dict.get(key)
        # A ShardedTensor was made of tensors on the host, and warns whenever an attribute of it is read.
        if type(value) is torch.Tensor or isinstance(value, DTensor | nn.Parameter):
            state_dict[key] = value if value.device.type == "cpu" else value.cpu()


# Loading


def _before_load(
    wrapper: nn.Module,
    state_dict: StateDict,
    prefix: str,
    local_metadata: StateDict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Turn keys and values into what the modules below look for. `state_dict` is nn.Module's own copy."""
    state = state_of(wrapper)
    state.begin_load(error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + plain_name(key[len(prefix) :])] = state_dict.pop(key)
    contents = _Contents.of(wrapper, prefix)
    _take_flat(state_dict, state.unit, contents, prefix, local_metadata)
    for key, record in contents.parameters.items():
        if key in state_dict:
            state_dict[key] = _taken_up(state, record, state_dict[key])
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _taken_up(state: WrapperState, record: ShardedParameter, given: object) -> object:
    """Returns a `ShardedTensor` unsharded, and a value of a tensor-parallel parameter with the shard's layout if it has
    another layout on the same mesh; any other value as it is."""
    extensions, spec = state.extensions, record.shard_spec
    if is_sharded_tensor(given):
        inner, shards = extensions.pre_load_state_dict_transform(given)
        full = full_of_sharded_tensor(inner, record.mesh.device, shards)
        if full is None:
            raise PlacementError(
                f"{record.name}: {type(extensions).__name__}.pre_load_state_dict_transform returned a "
                f"{type(inner).__name__}; it must return the ShardedTensor that is in the one it was given"
            )
        is_part = inner is not given and record in state.extended
        return extensions.post_unflatten_transform(full, state.extended[record]) if is_part else full
    if record not in state.extended or not isinstance(given, DTensor) or lies_as(given, spec):
        return given
    if given.shape != spec.shape or given.device_mesh != spec.mesh or not _same_beside(given, record):
        return given
    full = _gathered(state, record, on_mesh_device(given))
    return around(record.part_of(local_part(full)).detach().clone(), spec)


def _same_beside(given: DTensor, record: ShardedParameter) -> bool:
    """Returns whether `given`, on the shard's mesh, has the shard's placements on axes that are not data parallel."""
    names, own = given.device_mesh.mesh_dim_names or (), record.mesh.mesh.mesh_dim_names or ()
    pairs = zip(names, given.placements, record.shard_spec.placements, strict=True)
    return all(theirs == ours for name, theirs, ours in pairs if name not in own)


def _take_flat(state_dict: StateDict, unit: Unit, contents: _Contents, prefix: str, metadata: StateDict) -> None:
    """Replace a flat parameter by the shards that it stands for, which are views of it.

    Raises:
        PlacementError: it comes from another wrapping, or from another number of ranks.
    """
    own = _flat_parameter(unit)
    if own is None or prefix + FLAT_PARAM not in state_dict:
        return
    given, shapes = state_dict.pop(prefix + FLAT_PARAM), metadata.get(FLAT_PARAM, own.shapes)
    is_alike = isinstance(given, RaggedDTensor) and given.placements == own.placements and given.shape == own.shape
    if not is_alike or shapes != own.shapes:
        found = f"{tuple(given.shape)} with {given.placements}" if isinstance(given, DTensor) else f"a {type(given)}"
        raise PlacementError(
            f"{prefix}{FLAT_PARAM} of unit {unit.name} is {tuple(own.shape)} with {own.placements}, and {found} in the "
            f"state dict, of {own.shapes} here and {shapes} there; a LOCAL_STATE_DICT loads into the wrapping and the "
            "number of ranks that it comes from, a SHARDED_STATE_DICT into any"
        )
    (group,) = (weights.group for weights in unit.weights)
    vector, rank = local_tensor(given), group.mesh.piece
    slot_of = dict(zip(group.parameters, group.packing.slots, strict=True))
    for key, record in contents.parameters.items():
        if record in slot_of:
            slot = slot_of[record]
            held = slot.held(rank)
            part = vector[held.start : held.stop].view(slot.cut.local_shape(rank))
            state_dict[key] = around(part, record.shard_spec)


def _after_load(wrapper: nn.Module, incompatible_keys: tuple[list[str], list[str]]) -> None:
    """Put clean names into the report of what did not fit."""
    for keys in incompatible_keys:
        keys[:] = map(plain_name, keys)
    state_of(wrapper).end_load()


# torch's checkpointing


def named_for_checkpointing(
    wrapper: nn.Module, own: Iterator[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns the parameters that torch's checkpointing finds on `wrapper`: its `own`, with a flat parameter replaced
    by the parameters that it stands for.

    Checkpointing walks over modules to learn the names, and how the value under each name is distributed.
    """
    unit = state_of(wrapper).unit
    if not any(each.shards.shows_flat_parameter for each in (unit, *unit.companions)):
        yield from own
        return
    show_parameters_to_checkpointing()
    flat: object = _flat_parameter(unit)
    yield from ((name, parameter) for name, parameter in own if parameter is not flat)
    for name, record in _Contents.of(wrapper, "").parameters.items():
        if record.flat is not None:
            yield name, record.shard
