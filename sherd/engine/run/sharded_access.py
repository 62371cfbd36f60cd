"""Say which parameter an operation in a forward has met as a shard, where it needed the unsharded one, and what helps.

    self.block.forward(x)                   past the hooks that would gather
    fused_loss(x, self.head.weight, y)      the weight of a unit that is not running

What raises is torch's dispatch, or that of ragged tensors, and they know neither. A forward hook cannot raise in their
place, so the answer is added to their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from sherd.engine.run.unit import Unit
from sherd.engine.state.parameter import ShardedParameter, record_of
from sherd.errors import PlacementError

MIXED = "got mixed torch.Tensor and DTensor"
"""In what torch says of an operation on a DTensor and a plain tensor."""

SHOWN = 8
_REMEDY = (
    "which is gathered only while it runs. Call the module, not its forward: module(x); for a method, "
    "register_fsdp_forward_method(module, 'name'); to read a weight from outside, module.unshard() before and "
    "module.reshard() after, or leave the module that has it to the unit that reads it"
)


def explain(error: BaseException | None, units: Sequence[Unit]) -> None:
    """Say in `error`, which ended a forward of one of `units`, whose shards it met; nothing if it is of another kind.

    Args:
        error: the exception on its way out.
        units: all of the model.
    """
    if error is None or not met_a_shard(error):
        return
    error.args = (f"{error.args[0]}\n{_in_words(_records_met(error.__traceback__), units)}", *error.args[1:])


def met_a_shard(error: BaseException) -> bool:
    """Returns whether `error` is that of an operation on a shard and a plain tensor, or of one that runs of elements
    cannot answer."""
    said = str(error.args[0]) if error.args else ""
    if _REMEDY in said:
        return False  # a unit further in has said it
    of_ours = isinstance(error, PlacementError) and said.startswith("aten.")
    return of_ours or (isinstance(error, RuntimeError) and MIXED in said)


def _records_met(traceback: TracebackType | None) -> list[ShardedParameter]:
    """The parameters whose shards are at hand in the innermost frame that has any: in a variable, as its module's own,
    or below its module, if the code there has all words of the name."""
    for frame in reversed(list(_frames(traceback))):
        found = [record for value in list(frame.f_locals.values()) for record in _shards_of(value)]
        own = frame.f_locals.get("self")
        if not found and isinstance(own, nn.Module):
            words = set(frame.f_code.co_names)
            named = [each for name, each in own.named_parameters() if words.issuperset(name.split("."))]
            found = [record for each in (*own._parameters.values(), *named) for record in _shards_of(each)]
        if found:
            return list({id(record): record for record in found}.values())
    return []


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Yields the frames of `traceback`, but not of our dispatch, whose variables are what it happened to look at."""
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
        names = _some([record.name for record in records])
        what = (
            f"A shard was met where an unsharded parameter was needed: {names}, of unit {_some(list(owners.values()))}"
        )
    else:
        what = (
            f"A shard was met where an unsharded parameter was needed; units are {_some([unit.name for unit in units])}"
        )
    return f"{what}, {_REMEDY}"


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])
