"""Shard memory: copies values back into the shard buffer after a user gave an optimizer's tensors other memory.

the user does                                    the user finds                         sherd does
w.data -= ..., w.data.copy_(...), nn.init...     new values in the shard buffer         nothing
w.data = ...                                     new values, which w copied itself      nothing
torch.utils.swap_tensors(w, other)               another local tensor                   copies the values
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, move_hooks, spec_of, swap_devices
from sherd.engine.state.parameter import ShardedParameter, as_sharded
from sherd.errors import UnsupportedError, WriteBackError
from sherd.tensor.ragged import as_dtensor
from sherd.tensor.sharded import rest_on


class ShardMemory:
    """The memory of one group's optimizer parameters, as it was when they became views of the shard buffer.

    Attributes:
        versioned: the optimizer parameters whose writes torch counts: none if one was made in inference mode.
    """

    def __init__(self, records: Sequence[ShardedParameter]) -> None:
        self._records = records
        self.note()

    def note(self) -> None:
        """Remember the optimizer parameters, which may be other objects than before, and their memory."""
        self._optimizer_params = [as_sharded(record.optimizer_param) for record in self._records]
        self.versioned = [] if any(map(torch.is_inference, self._optimizer_params)) else self._optimizer_params
        self._locals = [record.resting for record in self._records]

    @property
    def are_taken(self) -> bool:
        """True if every optimizer parameter has the memory that it was given."""
        # Every forward asks, so C does most of it.
        try:
            now = list(map(local_tensor, self._optimizer_params))
        except AttributeError:  # one is no DTensor any more
            return False
        return all(map(is_, now, self._locals))

    @torch.no_grad()
    def settle(self) -> None:
        """Copy values from other memory into the shard buffer, and make the optimizer parameters views of it again.

        A parameter with another dtype or device is left as it is: the unit is grouped anew.

        Raises:
            WriteBackError: a parameter was swapped with a tensor of another layout.
        """
        for record, local in zip(self._records, self._locals, strict=True):
            optimizer_param: torch.Tensor = record.optimizer_param
            placements = record.shard_spec.placements
            is_alike = isinstance(optimizer_param, DTensor) and (
                record.flat is not None or spec_of(optimizer_param).placements == placements
            )
            if not is_alike:
                raise WriteBackError(
                    f"{record.name} was swapped with a {type(optimizer_param).__name__} that is not sharded as it is "
                    f"({placements}); swap it with a parameter of the same layout, or give the module a new one, "
                    "module.weight = nn.Parameter(value)"
                )
            given = record.resting
            if given is local or type(given) is not torch.Tensor or type(local) is not torch.Tensor or local.is_meta:
                continue
            if (given.shape, given.dtype, given.device) == (local.shape, local.dtype, local.device):
                local.copy_(given)
                rest_on(as_sharded(optimizer_param), local)
        self.note()


def give_memory(record: ShardedParameter, parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Make `local` the memory of `parameter`, the shard or the flat parameter of `record`.

    A DTensor takes gradients only on the device that it was made on. If `module.to()` or `to_empty()` moved `parameter`
    away from where shards rest, it is brought back, and stays the same object.

    Raises:
        UnsupportedError: `parameter` must be brought back, but has a gradient, or somebody holds it.
    """
    sharded = as_sharded(parameter)
    if not local.is_meta and parameter.device != local.device:
        if parameter.grad is not None:
            raise UnsupportedError(
                f"{record.name} was moved to {parameter.device} with its gradient; its shard rests on {local.device}. "
                "Call zero_grad() before a model with CPU offload is moved"
            )
        moved = as_dtensor(local, spec_of(sharded))
        moved.requires_grad_(parameter.requires_grad)
        move_hooks(parameter, moved)
        try:
            swap_devices(sharded, moved)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{record.name} is on {parameter.device}, its shard rests on {local.device}, and it cannot be brought "
                f"back ({error}). Leave the model where it was when it was sharded"
            ) from error
    rest_on(sharded, local)
    record.claim(parameter)
