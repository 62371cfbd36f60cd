"""Where the state of shards rests between steps, and state that is loaded, which goes there one tensor after the other.

torch gives loaded state the parameter's dtype and device. Moments of a bfloat16 parameter with float32 masters stay in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import spec_of
from sherd.engine import ShardedParameter
from sherd.policy import Disk, Place
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around


class Rest:
    """The memory at one place, for vectors that belong to shards.

    Args:
        place: where the vectors rest; None is where the step is.
        near: the device where the step is.
        pinned: host memory that an accelerator copies is page-locked.
        name: of the vectors, for messages.

    Attributes:
        device: in whose memory the vectors rest; the host's also for those on a `disk`.

    Raises:
        ScratchError: the folder of a disk cannot be used.
    """

    def __init__(self, place: Place | None, near: torch.device, pinned: bool, name: str = "") -> None:
        is_near = place in ("device", None) or near.type == "meta"
        self.near, self.device, self._name = near, near if is_near else torch.device("cpu"), name
        self.pinned = pinned and self.device != near
        self.disk = None
        if isinstance(place, Disk):
            from sherd.on_disk import vectors_on  # seldom needed, so loaded late

            self.disk = vectors_on(place)

    def has(self, local: torch.Tensor) -> bool:
        """Returns whether a vector, or a part of one, is there."""
        if self.disk is not None:
            return self.disk.has(local)
        return local.device == self.device and (not self.pinned or local.is_pinned())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory there. Raises ScratchError."""
        if self.disk is not None:
            return self.disk.empty(self._name, prod(shape), dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def placed(
        self, value: torch.Tensor, dtype: torch.dtype | None = None, before: object = None, async_op: bool = False
    ) -> torch.Tensor:
        """Returns `value` there, in `dtype` or its own: itself if it is so, else in the memory of `before` if fit."""
        local = local_part(value)
        dtype = dtype or local.dtype
        if local.dtype == dtype and self.has(local):
            return value
        far = local_part(before) if isinstance(before, torch.Tensor) else None
        if far is None or (far.shape, far.dtype) != (local.shape, dtype) or not self.has(far):
            far = self.empty(local.shape, dtype)
            before = around(far, spec_of(value)) if isinstance(value, DTensor) else far
        far.copy_(local, non_blocking=async_op)
        return cast("torch.Tensor", before)


def rest_of(parameter: torch.Tensor) -> Rest:
    """Returns where the state of `parameter` rests."""
    record, near = ShardedParameter.of(parameter), local_part(parameter).device
    owner = None if record is None else record.owner
    if owner is None:
        return Rest(None, near, False)
    return Rest(owner.place.state, near, owner.place.pinned, f"state of {ShardedParameter.name_of(parameter)}")


def at_rest(parameter: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns `value`, state of `parameter`, in `dtype` where it rests; uncopied if it is so. None: in its own."""
    rest = rest_of(parameter)
    return rest.placed(value, dtype) if value.ndim else value.to(rest.near, dtype)


def as_kept(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that an optimizer loads for `parameter` as the optimizer keeps it."""
    record = ShardedParameter.of(parameter)
    has_masters = record is not None and record.masters is not None
    return at_rest(parameter, value, torch.float32 if has_masters else parameter.dtype)
