"""Shard memory: notices that a user has given an optimizer's tensors other memory than the shard buffer, and copies the
values into the shard buffer.

    the user does                                    and finds                              and we
    w.data -= ..., w.data.copy_(...), nn.init...     new values in the shard buffer         do nothing
    w.data = ...                                     new values, which w copied itself      do nothing
    torch.utils.swap_tensors(w, other)               another local tensor                   copy its values
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
    """The memory of one group's optimizer parameters, as it was when they became views of the shard buffer. torch
    counts the writes to those that are `versioned`: none that were made in inference mode."""

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
        """True if every optimizer parameter has the memory that it was given. Every forward asks, so C does most of
        it."""
        try:
            now = list(map(local_tensor, self._optimizer_params))
        except AttributeError:  # it is no DTensor any more
            return False
        return all(map(is_, now, self._locals))

    @torch.no_grad()
    def settle(self) -> None:
        """Copy values from other memory into the shard buffer, and make the optimizer parameters views of it again.

        One of another dtype or on another device is left as it is: the unit is grouped anew.

        Raises:
            WriteBackError: it was swapped with a tensor that is not sharded as it is.
        """
        for record, local in zip(self._records, self._locals, strict=True):
            _require_alike(record, record.optimizer_param)
            if record.resting is not local:
                _take_swapped(as_sharded(record.optimizer_param), local)
        self.note()


def _require_alike(record: ShardedParameter, optimizer_param: torch.Tensor) -> None:
    """Raise unless `optimizer_param` is still a DTensor of the parameter's layout."""
    ours = record.shard_spec if record.flat is None else None
    is_alike = isinstance(optimizer_param, DTensor) and (
        ours is None or spec_of(optimizer_param).placements == ours.placements
    )
    if not is_alike:
        raise WriteBackError(
            f"{record.name} was swapped with a {type(optimizer_param).__name__} that is not sharded as it is "
            f"({record.shard_spec.placements}); swap it with a parameter of the same layout, or give the module a new "
            "one, module.weight = nn.Parameter(value)"
        )


def _take_swapped(optimizer_param: DTensor, local: torch.Tensor) -> None:
    given = local_tensor(optimizer_param)
    is_own = type(given) is type(local) is torch.Tensor and not local.is_meta
    if is_own and (given.shape, given.dtype, given.device) == (local.shape, local.dtype, local.device):
        local.copy_(given)
        rest_on(optimizer_param, local)


def give_memory(record: ShardedParameter, parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Make `local` the memory of `parameter`, the shard or the flat parameter of `record`.

    A DTensor takes gradients on no other device than that it was made on. `module.to()` and `to_empty()` may have
    brought it to another one than where shards rest; it is then brought back, and stays the same object.

    Raises:
        UnsupportedError: it has a gradient, or somebody holds it, so that it cannot be brought back.
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
