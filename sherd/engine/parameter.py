"""One parameter: what it is as a shard, what it is as a whole, and the places in the modules where it hangs.

A Parameter object is replaced once, when it is sharded: the shard (a DTensor) is what the module shows and the
optimizer owns; the whole one is shown during forward and backward only. The replaced object knows its successor.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec, local_tensor
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs

_records: dict[int, tuple[weakref.ref[ShardedParameter], weakref.ref[torch.Tensor] | None]] = {}
"""By the id of a tensor: its record, and the tensor itself where the record does not hold it.

Nothing is written on tensors: it would travel into copies and files. And no weak reference is taken to a shard, for
torch refuses to swap a tensor that has one (`module.to()`); a shard is known by being its record's.
"""


def record_of(tensor: torch.Tensor) -> ShardedParameter | None:
    """The record of a shard, of a whole parameter, or of the Parameter that was sharded; None for any other tensor."""
    entry = _records.get(id(tensor))
    if entry is None:
        return None
    record, held = entry[0](), entry[1]
    if record is None or tensor is not (record.shard if held is None else held()):
        return None
    return record


def _forget(key: int, died: Any) -> None:
    """Drop the entry that `died`, a weak reference, is part of; the id may have gone to another tensor since."""
    if any(died is each for each in _records.get(key, ())):
        _records.pop(key, None)


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute of a module that holds the parameter. The dict is the module's own, so no module is kept alive."""

    parameters: dict[str, nn.Parameter | None]
    attribute: str

    def is_at(self, module: nn.Module, attribute: str) -> bool:
        """Whether this is that attribute of that module."""
        return self.parameters is module._parameters and self.attribute == attribute

    def show(self, parameter: nn.Parameter) -> None:
        # Past nn.Module.__setattr__, which would cost ten times as much, four times a step.
        self.parameters[self.attribute] = parameter


class Owner(Protocol):
    """What a parameter needs to know of its unit."""

    id: int

    def shards_written(self) -> None:
        """Shards have new values: whole parameters made from the old ones are stale."""


@dataclass(eq=False)
class ShardedParameter:
    """The record of one parameter.

    `shape` and `dtype` are the whole's (the local tensor's, under tensor parallelism). `shard_spec` and `whole_spec`
    say which DTensor each form is; `whole_spec` is None for a plain tensor. `lot`: which of the unit's plans cut it, if
    it is cut into runs. `holder` is the module it was found on.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    cut: Cut | Runs
    lot: int
    shard_spec: DTensorSpec
    whole_spec: DTensorSpec | None
    shard: nn.Parameter
    holder: weakref.ref[nn.Module]
    places: list[Place] = field(default_factory=list)
    _owner: weakref.ref[Owner] | None = None

    def claim(self, tensor: torch.Tensor) -> None:
        """Remember that `tensor` is a form of this parameter: its shard, its whole, or what it was before."""
        key = id(tensor)
        forget = functools.partial(_forget, key)
        held = None if tensor is self.shard else weakref.ref(tensor, forget)
        _records[key] = (weakref.ref(self, forget), held)

    def belong_to(self, owner: Owner) -> None:
        """Be owned by a unit, which is told when the shard is written."""
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        """The unit it belongs to, if that still exists."""
        return None if self._owner is None else self._owner()

    def exchange(self, shard: nn.Parameter) -> None:
        """Take another DTensor of the same layout as the shard; the old one has it as its successor."""
        before, self.shard = self.shard, shard
        self.claim(before)
        self.claim(shard)
        self.show(shard)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard as a plain tensor, `cut.local_shape(rank)`."""
        assert isinstance(self.shard, DTensor), f"{self.name}: a shard is a DTensor"
        return local_tensor(self.shard)

    def show(self, parameter: nn.Parameter) -> None:
        """Hang `parameter`, a form of this one, on every place."""
        for place in self.places:
            place.show(parameter)
