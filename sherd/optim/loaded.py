"""State that is loaded into an optimizer: in the dtype of what the optimizer steps, and where its state rests.

torch gives loaded state the parameter's dtype and device. Moments of a bfloat16 parameter with float32 masters stay in
float32, and state that rests elsewhere goes there, one tensor after the other.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import spec_of
from sherd.engine import ShardedParameter
from sherd.policy import Disk
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around


def device_of_state(parameter: torch.Tensor) -> torch.device:
    """Returns the device in whose memory the state of `parameter` rests; the host's also for state on a disk."""
    record = ShardedParameter.of(parameter)
    owner = None if record is None else record.owner
    is_far = owner is not None and owner.place.brings_state
    return torch.device("cpu") if is_far else local_part(parameter).device


def at_rest(parameter: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns `value`, state of `parameter`, in `dtype` where it rests; uncopied if it is so. None: in its own."""
    record, local = ShardedParameter.of(parameter), local_part(value)
    owner = None if record is None else record.owner
    if owner is None or not value.ndim or not owner.place.brings_state:
        return value.to(local_part(parameter).device, dtype)
    dtype, place = dtype or local.dtype, owner.place
    if isinstance(place.state, Disk):
        from sherd.optim.on_disk import vectors_on  # seldom needed, so loaded late

        vectors = vectors_on(place.state)
        if local.dtype == dtype and vectors.has(local):
            return value
        far = vectors.empty(f"state of {ShardedParameter.name_of(parameter)}", local.numel(), dtype).view(local.shape)
    elif (local.device.type, local.dtype) == ("cpu", dtype) and (local.is_pinned() or not place.pinned):
        return value
    else:
        far = torch.empty(local.shape, dtype=dtype, pin_memory=place.pinned)
    far.copy_(local)
    return around(far, spec_of(value)) if isinstance(value, DTensor) else far


def as_kept(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that an optimizer loads for `parameter` as the optimizer keeps it."""
    record = ShardedParameter.of(parameter)
    has_masters = record is not None and record.masters is not None
    return at_rest(parameter, value, torch.float32 if has_masters else parameter.dtype)
