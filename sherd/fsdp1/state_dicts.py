"""The hooks around `state_dict()` and `load_state_dict()` of a wrapper.

Both methods go through nn.Module's own machinery, which finds shards where parameters are registered. Around it:

    before      parameters of a unit with a flat parameter are registered under their own names; for a load, clean names
                become the modules' paths, and legacy values become DTensors or unsharded tensors
    after       paths become clean names, and shards become the chosen kind (`state_dict_type.py`); the flat parameter
                is registered again

`sherd/engine/between/load.py` cuts full tensors, and shards of other layouts, on the way in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import asked_by_checkpointing, full_of_sharded_tensor, is_sharded_tensor, local_tensor, spec_of
from sherd.checkpoint.by_parameter import show_parameters_to_checkpointing
from sherd.comm.mesh import permuted
from sherd.engine import FlatParameter, ShardedParameter, Unit, UnshardedCopies
from sherd.errors import PlacementError
from sherd.fsdp1.arguments import ShardingStrategy, devices_here
from sherd.fsdp1.extensions import has_own
from sherd.fsdp1.state_dict_type import ShardedForm, StateDict, StateDictType, is_on_rank0_only
from sherd.fsdp1.wrapper_state import WrapperState, find_state, state_of
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, local_part
from sherd.tensor.relayout import around, as_rows, full_of, lies_as, on_mesh_device
from sherd.wrap.names import WRAPPED, plain_name

FLAT_PARAM = "_flat_param"
"""The name of a flat parameter, in its wrapper and in a local state dict."""


def install(wrapper: nn.Module) -> None:
    wrapper.register_state_dict_pre_hook(_before_save)
    wrapper.register_state_dict_post_hook(_after_save)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


# The entries of one wrapper


@dataclass(frozen=True, slots=True)
class _Contents:
    """A wrapper's part of a state dict, without nested wrappers: parameters, and original dtypes of buffers, by key."""

    parameters: dict[str, ShardedParameter]
    buffers: dict[str, torch.dtype | None]

    @classmethod
    def of(cls, wrapper: nn.Module, prefix: str) -> _Contents:
        state = state_of(wrapper)
        registered = {
            (place.module_id, place.attribute): record
            for unit in (state.unit, *state.unit.tied_owners)
            for record in unit.parameters
            for place in record.places
        }
        contents = cls({}, {})
        # A module that is registered in several places has keys for each place.
        stack = [("", wrapper)]
        while stack:
            path, module = stack.pop()
            own_prefix = prefix + plain_name(path)
            for name in module._parameters:
                record = registered.get((id(module), name))
                if record is not None:
                    contents.parameters[own_prefix + name] = record
            for name in module._buffers:
                contents.buffers[own_prefix + name] = state.buffer_dtypes.get((module, name))
            for name, child in module._modules.items():
                if child is not None and find_state(child) is None:
                    stack.append((f"{path}{name}.", child))
        return contents


# Saving


def _before_save(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    state_of(wrapper).show_names()


@torch.no_grad()
def _after_save(wrapper: nn.Module, state_dict: StateDict, prefix: str, local_metadata: StateDict) -> None:
    """Give the keys clean names and the values the chosen kind."""
    _strip(state_dict, prefix)
    state, contents = state_of(wrapper), _Contents.of(wrapper, prefix)
    unit, config = state.unit, state.settings.state_dict_config
    # A user may have changed the unsharded copies: their parts on this rank stand for shards that may be out of date.
    for key, record in contents.parameters.items():
        if record.lent is not None and key in state_dict:
            part = record.part_of(local_part(record.lent)).detach().clone()
            state_dict[key] = as_dtensor(part, record.shard_spec)
    if asked_by_checkpointing():
        # torch's checkpointing gathers and offloads shards by itself; the wrapper's default would be unsharded tensors.
        return
    state_dict_type = _kind_of(state)
    assert config is not None, "a wrapper has a config"
    hidden: set[str] = set()
    if state_dict_type is StateDictType.FULL_STATE_DICT:
        copies = [record.lent for record in unit.parameters]
        is_lent_to_rank0 = unit.lent is not None and bool(copies) and all(copy is None for copy in copies)
        shown = not is_lent_to_rank0 and (not is_on_rank0_only(config) or dist.get_rank(state.process_group) == 0)
        _put_full(state_dict, state, contents, shown, config.offload_to_cpu)
        hidden = set() if shown else {*contents.parameters, *contents.buffers}
    elif state_dict_type is StateDictType.LOCAL_STATE_DICT:
        hidden = _put_flat(state_dict, unit, contents, prefix, local_metadata)
    elif config._wanted is not ShardedForm.RUNS:
        _put_rows(state_dict, state, contents, config._wanted, config.offload_to_cpu)
        for key, shard in tuple(state_dict.items()) if config._wanted is ShardedForm.ROWS else ():
            if key.startswith(prefix) and isinstance(shard, DTensor):  # of a unit that `fully_shard` made
                state_dict[key] = as_rows(shard)
    for key in hidden:
        state_dict.pop(key, None)
    if state_dict_type is not StateDictType.LOCAL_STATE_DICT:
        for key, dtype in contents.buffers.items():
            if dtype is not None and key in state_dict:
                state_dict[key] = state_dict[key].to(dtype)
    if config.offload_to_cpu:
        for key in (*contents.parameters, *contents.buffers, prefix + FLAT_PARAM):
            value: object = state_dict.get(key)
            # A ShardedTensor consists of tensors on the host already, and reading any attribute of it warns.
            if type(value) is torch.Tensor or isinstance(value, DTensor | nn.Parameter):
                state_dict[key] = value if value.device.type == "cpu" else value.cpu()


def _strip(state_dict: StateDict, prefix: str) -> None:
    """Take the wrapped module's name out of the keys that start with `prefix`."""
    inner = f"{prefix}{WRAPPED}."
    # Keys with the prefix are the last keys at this point, so that putting them back one by one keeps the order.
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        state_dict[prefix + key[len(inner) :] if key.startswith(inner) else key] = value
    # Modules look up versions under the wrapper's name when the wrapper loads, and else under the user's own name.
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for path in [path for path in metadata if f"{path}.".startswith(inner)]:
            metadata.setdefault(plain_name(path), metadata[path])


def _kind_of(state: WrapperState) -> StateDictType:
    kind = state.settings.state_dict_type
    assert kind is not None, "a wrapper has a kind"
    if kind is not StateDictType.FULL_STATE_DICT and state.choices.strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"unit {state.unit.name} is NO_SHARD, so a full state dict is given, though {kind.name} was asked for",
            stacklevel=4,
        )
        return StateDictType.FULL_STATE_DICT
    return kind


def _put_full(state_dict: StateDict, state: WrapperState, contents: _Contents, shown: bool, on_host: bool) -> None:
    """Put unsharded tensors in the place of shards.

    Collective over the shard axis and the axes of tensor parallelism, outside of `sherd.unsharded`.
    """
    fulls = _unsharded_copies(state.unit, contents, shown, on_host)
    if has_own(state.extensions, "all_gather_dtensor") and state.unit.lent is None:
        for record in state.extended:
            gathered = _gathered(state, record, around(record.local.detach(), record.shard_spec))
            if shown:
                fulls[record] = gathered
    plain = {record: full_of(full) if isinstance(full, DTensor) else full for record, full in fulls.items()}
    _put(state_dict, contents, plain)


def _put(state_dict: StateDict, contents: _Contents, values: Mapping[ShardedParameter, object]) -> None:
    for key, record in contents.parameters.items():
        if key in state_dict and record in values:
            state_dict[key] = values[record]


def _gathered(state: WrapperState, record: ShardedParameter, shards: DTensor) -> torch.Tensor:
    """Returns `shards`, of a tensor-parallel parameter or of a value for it, gathered over the data-parallel axes."""
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
            # Another wrapper owns the parameter, and this wrapper uses it too. All ranks gather in the same order.
            shard = record.shard
            assert isinstance(shard, DTensor), "what the optimizer owns is a DTensor"
            fulls[record] = full_of(shard) if record.lent is None else record.lent.detach().clone()
    return fulls


def _flat_parameter(unit: Unit) -> FlatParameter | None:
    owned = unit.parameters[0].optimizer_param if unit.parameters else None
    return owned if isinstance(owned, FlatParameter) else None


def _put_flat(state_dict: StateDict, unit: Unit, contents: _Contents, prefix: str, metadata: StateDict) -> set[str]:
    """Put the unit's flat parameter, if any, before the unit's other keys, and the shapes into the `metadata`.

    Returns:
        The keys of the parameters in the flat parameter.
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
    """Give keys and values the form that the modules below load. `state_dict` is nn.Module's own copy."""
    state = state_of(wrapper)
    state.begin_load(error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + plain_name(key[len(prefix) :])] = state_dict.pop(key)
    contents = _Contents.of(wrapper, prefix)
    _take_flat(state_dict, state.unit, contents, prefix, local_metadata)
    for key, record in contents.parameters.items():
        if key in state_dict:
            state_dict[key] = _converted(state, record, state_dict[key])
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _converted(state: WrapperState, record: ShardedParameter, given: object) -> object:
    """Returns a value that the engine can load.

    A `ShardedTensor` becomes unsharded. A value for a tensor-parallel parameter, with another layout on the shard's
    mesh, gets the shard's layout. Any other value stays.
    """
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
    if given.shape != spec.shape or given.device_mesh != spec.mesh:
        return given
    # The extensions gather over the data-parallel axes alone, so the placements on all other axes must be the shard's.
    names, data_parallel = given.device_mesh.mesh_dim_names or (), record.mesh.mesh.mesh_dim_names or ()
    pairs = zip(names, given.placements, spec.placements, strict=True)
    if any(theirs != ours for name, theirs, ours in pairs if name not in data_parallel):
        return given
    full = _gathered(state, record, on_mesh_device(given))
    return around(record.part_of(local_part(full)).detach().clone(), spec)


def _take_flat(state_dict: StateDict, unit: Unit, contents: _Contents, prefix: str, metadata: StateDict) -> None:
    """Replace a flat parameter by its shards, which are views of it.

    Raises:
        PlacementError: the flat parameter comes from another wrapping, or from another number of ranks.
    """
    own = _flat_parameter(unit)
    if own is None or prefix + FLAT_PARAM not in state_dict:
        return
    given, shapes = state_dict.pop(prefix + FLAT_PARAM), metadata.get(FLAT_PARAM, own.shapes)
    is_alike = isinstance(given, RaggedDTensor) and given.placements == own.placements and given.shape == own.shape
    if not is_alike or shapes != own.shapes:
        theirs = f"{tuple(given.shape)} with {given.placements}" if isinstance(given, DTensor) else f"a {type(given)}"
        raise PlacementError(
            f"{prefix}{FLAT_PARAM} of unit {unit.name} is {tuple(own.shape)} with {own.placements}, and {theirs} in "
            f"the state dict, of {own.shapes} in the model and {shapes} in the state dict; a LOCAL_STATE_DICT loads "
            "into the wrapping and the number of ranks that it comes from, a SHARDED_STATE_DICT into any"
        )
    (group,) = (weights.group for weights in unit.weights)
    vector, rank = local_tensor(given), group.mesh.piece
    slot_of = dict(zip(group.parameters, group.packing.slots, strict=True))
    for key, record in contents.parameters.items():
        if record in slot_of:
            slot = slot_of[record]
            extent = slot.held(rank)
            part = vector[extent.start : extent.stop].view(slot.cut.local_shape(rank))
            state_dict[key] = around(part, record.shard_spec)


def _after_load(wrapper: nn.Module, incompatible_keys: tuple[list[str], list[str]]) -> None:
    """Put clean names into the lists of missing and unexpected keys."""
    for keys in incompatible_keys:
        keys[:] = map(plain_name, keys)
    state_of(wrapper).end_load()


# torch's checkpointing


def plain_names(theirs: Callable[..., set[str]], *args: object, **kwargs: object) -> set[str]:
    """Returns what torch's `_get_fqns` does, without our wrappers: it knows torch's own only."""
    return set(map(plain_name, theirs(*args, **kwargs)))


def named_for_checkpointing(
    wrapper: nn.Module, own: Iterator[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that torch's checkpointing finds on `wrapper`: parameters in the place of a flat parameter.

    Checkpointing walks over modules to learn the names, and how the value under each name is distributed.
    """
    unit = state_of(wrapper).unit
    if not any(each.shards.shows_flat_parameter for each in (unit, *unit.tied_owners)):
        yield from own
        return
    show_parameters_to_checkpointing()
    flat: object = _flat_parameter(unit)
    yield from ((name, parameter) for name, parameter in own if parameter is not flat)
    for name, record in _Contents.of(wrapper, "").parameters.items():
        if record.flat is not None:
            yield name, record.shard
