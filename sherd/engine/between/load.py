"""Hooks for state dicts: cut unsharded tensors to this rank's shards before a load, and adopt new shards after it.

torch copies a DTensor into a DTensor, but refuses a plain tensor. With these hooks a full state dict loads as it is. No
rank communicates, as each has the full state dict.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sherd._torch import dtensor_spec
from sherd.engine.run.hooks import eager
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import group_key_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import ShardedParameter, as_sharded, record_of
from sherd.errors import StateError
from sherd.tensor.placement import is_ragged, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, distribute_ragged
from sherd.tensor.sharded import rest_on


def install(unit: Unit, holders: Iterable[nn.Module]) -> None:
    for holder in holders:
        holder.register_state_dict_pre_hook(eager(before_save, unit))
        holder.register_load_state_dict_pre_hook(eager(before_load, unit))
        holder.register_load_state_dict_post_hook(eager(after_load, unit))


def before_save(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show the shards of `module`, which the state dict will hold."""
    unit.show_shards()
    require_names(unit, module, "state_dict")


def before_load(unit: Unit, module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Show the shards of `module`, and cut the unsharded tensors in `state_dict` to this rank's part."""
    unit.show_shards()
    require_names(unit, module, "load_state_dict")
    for attribute, parameter in module._parameters.items():
        record = None if parameter is None else record_of(parameter)
        given = state_dict.get(prefix + attribute)
        if record is None or not isinstance(given, torch.Tensor):
            continue
        if isinstance(given, DTensor):
            # torch may copy `given` if both are ragged or neither is, and they are cut alike. Of chunks that differ
            # the copy fails where chunks are empty, and `assign=True` would take over another part than the
            # parameter's: test_a_state_dict_of_any_layout_loads_into_any.
            placements = as_sharded(record.shard).placements
            if isinstance(given, RaggedDTensor) == record.cut.in_line and given.placements == placements:
                continue
            given = given.full_tensor()
        if given.shape == record.shard.shape:
            state_dict[prefix + attribute] = _shard_of(record, given)


def after_load(unit: Unit, module: nn.Module, incompatible_keys: object) -> None:
    """Adopt Parameters that `assign=True` put in the place of shards, and note that shards have new values."""
    must_rebind = []
    for attribute, parameter in module._parameters.items():
        record = unit.shards.record_at(module, attribute)
        if record is None or parameter is None or parameter is record.shard or parameter is record.lent:
            continue
        if record.flat is not None:
            record.notice_replaced()  # the optimizer owns the memory that the shard is a view of
        else:
            must_rebind.append(_exchange(record, parameter))
            watcher.sharded_again()
    if any(must_rebind):
        unit.rebind()
    elif must_rebind:
        unit.shards.note_optimizer_params()
    unit.compared.loaded()
    unit.shards_written()


@torch.no_grad()
def _exchange(record: ShardedParameter, parameter: nn.Parameter) -> bool:
    """Make `parameter` the shard and copy its values into the old shard's memory.

    Returns True if the memory does not fit (another dtype or device), so that the unit must rebuild its buffer.
    """
    key, place = group_key_of(record), record.local
    record.exchange(parameter)
    is_alike = group_key_of(record) == key and record.local.device == place.device
    if key.gathers_itself or place.is_meta or not is_alike:
        return True
    # Copied into the old memory. To rebuild the buffer after every module of a load would take quadratic time.
    place.copy_(record.local)
    rest_on(as_sharded(parameter), place)
    return False


def require_names(unit: Unit, module: nn.Module, method: str) -> None:
    """Raise `StateError` if a flat parameter is registered in place of parameters of `module`.

    The wrapper and the modules above it register the parameters before they call the hooks of `module`.
    """
    if any(unit.shards.hides(module, attribute) for attribute in module._parameters):
        raise StateError(
            f"{method}() of a {type(module).__name__} inside wrapped unit {unit.name}: its parameters are part of a "
            "flat parameter, and only the wrapper can show them; call it on the wrapper, or on the model around it"
        )


def _shard_of(record: ShardedParameter, unsharded: torch.Tensor) -> DTensor:
    """Returns this rank's part of `unsharded`, a view of it, as a DTensor like the shard."""
    spec = record.shard_spec
    if record.unsharded_spec is not None and is_ragged(spec):
        return distribute_ragged(unsharded, layout_of(spec).spec(unsharded.dtype))
    if record.unsharded_spec is not None:
        return distribute_tensor(unsharded, spec.mesh, spec.placements, src_data_rank=None)
    return as_dtensor(
        record.part_of(unsharded).detach(), dtensor_spec(spec.mesh, spec.placements, unsharded.shape, unsharded.dtype)
    )
