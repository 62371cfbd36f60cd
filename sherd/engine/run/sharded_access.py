"""The explanation of an error of an operation in forward that got a shard and needed the unsharded parameter.

    self.block.forward(x)                   skips the hooks that gather
    fused_loss(x, self.head.weight, y)      the weight of a unit that is not running

The error comes from torch's dispatch, or from that of ragged tensors, which know neither the parameter's name nor a
remedy. A forward hook cannot replace the error, so the explanation is added to its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import ShardedParameter, record_of
from sherd.errors import PlacementError, in_short

MIXED = "got mixed torch.Tensor and DTensor"
"""A part of torch's message about an operation on a DTensor and a plain tensor."""

_REMEDY = (
    "which is gathered only while it runs. Call the module, not its forward: module(x); for a method, "
    "register_fsdp_forward_method(module, 'name'); to read a weight from outside, module.unshard() before and "
    "module.reshard() after, or leave the module that has it to the unit that reads it"
)


def explain(error: BaseException | None, units: Sequence[Unit]) -> None:
    """Add to the text of `error`, which ended a forward, if it is about a shard. `units` are all of the model's."""
    if error is None or not met_a_shard(error):
        return
    error.args = (f"{error.args[0]}\n{_in_words(_records_met(error.__traceback__), units)}", *error.args[1:])


def met_a_shard(error: BaseException) -> bool:
    """Returns whether `error` is about an operation that got a shard: mixed with a plain tensor, or cut into runs."""
    message = str(error.args[0]) if error.args else ""
    if _REMEDY in message:
        return False  # a unit further in has explained the error
    is_ragged = isinstance(error, PlacementError) and message.startswith("aten.")
    return is_ragged or (isinstance(error, RuntimeError) and MIXED in message)


def _records_met(traceback: TracebackType | None) -> list[ShardedParameter]:
    """Returns the parameters whose shards the innermost frame with any shard can reach.

    A frame reaches a shard by a variable, as a parameter of its module, or below its module, if the frame's code has
    all words of the name.
    """
    for frame in reversed(list(_frames(traceback))):
        records = [record for value in list(frame.f_locals.values()) for record in _shards_of(value)]
        own = frame.f_locals.get("self")
        if not records and isinstance(own, nn.Module):
            words = set(frame.f_code.co_names)
            named = [parameter for name, parameter in own.named_parameters() if words.issuperset(name.split("."))]
            records = [record for value in (*own._parameters.values(), *named) for record in _shards_of(value)]
        if records:
            return list({id(record): record for record in records}.values())
    return []


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Yields the frames of `traceback`, except sherd's dispatch, whose variables say nothing of the user's code."""
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("sherd.tensor."):
            yield traceback.tb_frame
        traceback = traceback.tb_next


def _shards_of(value: Any) -> Iterator[ShardedParameter]:
    record = record_of(value) if isinstance(value, torch.Tensor) else None
    if record is not None and value is record.shard:
        yield record


def _in_words(records: Sequence[ShardedParameter], units: Sequence[Unit]) -> str:
    if records:
        owners = {owner.id: owner.name for record in records if isinstance(owner := record.owner, Unit)}
        names = in_short([record.name for record in records])
        which = f": {names}, of unit {in_short(list(owners.values()))}"
    else:
        which = f"; units are {in_short([unit.name for unit in units])}"
    return f"A shard was met where an unsharded parameter was needed{which}, {_REMEDY}"
