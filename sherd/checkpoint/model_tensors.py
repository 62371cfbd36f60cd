"""The parameters and buffers of a model as they are between steps: named, each once, to be read and written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import spec_of
from sherd.checkpoint.catalog import places_of
from sherd.checkpoint.relayout import full_of, laid_out, lies_as
from sherd.comm.agreement import in_short
from sherd.engine import FlatParameter, ShardedParameter, Unit
from sherd.errors import StateError
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name

Named = Mapping[str, torch.Tensor]


class ModelTensors:
    """The parameters and buffers below a module, each once, under its first name; and the units that own them.

    `aliases` are the other names of tied parameters. `saved_buffers` are the names of buffers that a state dict has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: dict[str, ShardedParameter | nn.Parameter] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, record, parameter in places_of(module):
            held = record or parameter
            if isinstance(parameter, FlatParameter):
                continue  # its members have places of their own
            name = plain_name(path)
            if first.setdefault(id(held), name) == name:
                self._held[name] = held
            else:
                self.aliases[name] = first[id(held)]
        self.records = {name: held for name, held in self._held.items() if isinstance(held, ShardedParameter)}
        self.trained = {name for name, held in self._held.items() if held.requires_grad}
        self.buffers = {plain_name(path): buffer for path, buffer in module.named_buffers()}
        self.saved_buffers = {
            plain_name(f"{path}.{name}" if path else name)
            for path, below in module.named_modules()
            for name in below._buffers.keys() - below._non_persistent_buffers_set
        } & self.buffers.keys()
        owners = [*Unit.below(module), *(record.owner for record in self.records.values())]
        self._units = {owner.id: owner for owner in owners if isinstance(owner, Unit)}.values()

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """All of them: shards, and plain tensors."""
        shards = {name: record.shard for name, record in self.records.items()}
        return {**self._held, **shards, **self.buffers}  # type: ignore[dict-item]  # no record is left

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """All but buffers that a state dict leaves out."""
        left_out = self.buffers.keys() - self.saved_buffers
        return {name: tensor for name, tensor in self.by_name.items() if name not in left_out}

    def require_at_rest(self, call: str) -> None:
        """Raise `StateError` if the tensors are in use, or on the meta device. Values that a user has put in the place
        of shards are taken."""
        for unit in self._units:
            unit.require_at_rest(call)
            unit.notice_replaced()
        on_meta = [name for name, tensor in self.by_name.items() if local_part(tensor).is_meta]
        if on_meta:
            raise StateError(f"{call}: {in_short(on_meta)} on the meta device; give the model memory and values first")

    def take(self, values: Named) -> None:
        """Copy `values` into the tensors of these names."""
        self.before_writing()
        put(self.by_name, values)
        self.after_writing()

    def before_writing(self) -> None:
        """Find the memory of shards that a user has moved."""
        for unit in self._units:
            unit.notice_moved()

    def after_writing(self) -> None:
        """Tell the units that their shards have other values."""
        for unit in self._units:
            unit.compared.loaded()
            unit.shards_written()


@torch.no_grad()
def put(targets: Named, values: Named) -> None:
    """Copy each of `values`, in any layout, into the one of `targets` of its name."""
    for name, value in values.items():
        target, source = targets[name], value
        if isinstance(target, DTensor):
            if not (isinstance(value, DTensor) and lies_as(value, spec_of(target))):
                source = laid_out(value, spec_of(target), local_part(target).device)
        elif isinstance(value, DTensor):
            source = full_of(value)
        local_part(target).copy_(local_part(source))


def without_wrappers(name: str) -> str:
    """Returns the name of a parameter as the plain model has it: also without `torch.compile`'s part."""
    return ".".join(part for part in plain_name(name).split(".") if part != "_orig_mod")
