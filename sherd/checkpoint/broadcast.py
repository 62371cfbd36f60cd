"""An optimizer state that only rank 0 has, on all ranks: its outline at once, each tensor when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd.checkpoint.catalog import StateDict
from sherd.comm.failures import named
from sherd.comm.mesh import default_device_type
from sherd.comm.objects import broadcast_object
from sherd.errors import OptimStateError


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor that rank 0 has. On other ranks `tensor` is None."""

    shape: torch.Size
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    tensor: torch.Tensor | None

    def take(self) -> torch.Tensor:
        """Broadcast the tensor. All ranks must call it, for the same tensors in the same order."""
        device = torch.device(default_device_type(self.group))
        if self.tensor is None:
            here = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            here = self.tensor.detach().to(device).contiguous()
        with named("rank 0's broadcast of optimizer state", self.group):
            dist.broadcast(here, group=self.group, group_src=0)
        return here if self.shape else here.cpu()  # optimizers read a count of steps on the host


def from_rank0(state_dict: StateDict | None, group: dist.ProcessGroup | None) -> StateDict:
    """The `state_dict` of rank 0 of `group`, with a `Sent` for each tensor. All ranks of `group` must call it.

    Raises:
        OptimStateError: it has no "state", or it has DTensors, of which rank 0 has only a part. On all ranks.
    """
    is_source = dist.get_rank(group) == 0
    outline = _outlined(state_dict) if is_source else None
    outline = broadcast_object(outline, "rank 0's broadcast of optimizer state", group)
    if isinstance(outline, str):
        raise OptimStateError(outline)
    assert isinstance(outline, dict), "rank 0 sends an outline, or the text of an error"
    given = state_dict if is_source and state_dict is not None else {"state": {}}
    sent = {name: _with_tensors(state, given["state"].get(name), group) for name, state in outline["state"].items()}
    return {**outline, "state": sent}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in the outline."""

    shape: torch.Size
    dtype: torch.dtype


def _outlined(state_dict: StateDict | None) -> StateDict | str:
    """`state_dict` without the data of its tensors. If it cannot be sent, returns the text of the error that all ranks
    raise."""
    if not isinstance(state_dict, dict) or "state" not in state_dict:
        return NO_STATE
    states = state_dict["state"]
    for name, state in states.items():
        if isinstance(state, dict) and any(isinstance(value, DTensor) for value in state.values()):
            return (
                f"{name}: rank 0 has DTensors, of which it holds a part, and rank0_only asks for whole tensors from "
                "it; save with the full state dict type, or load on all ranks"
            )
    return {**state_dict, "state": {name: _without_tensors(state) for name, state in states.items()}}


def _without_tensors(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _with_tensors(outline: object, given: Any, group: dist.ProcessGroup | None) -> object:
    """`outline` with a `Sent` for each tensor. `given` is rank 0's state, None on other ranks."""
    if isinstance(outline, dict):
        return {key: _with_tensors(item, None if given is None else given[key], group) for key, item in outline.items()}
    return Sent(outline.shape, outline.dtype, group, given) if isinstance(outline, _Tensor) else outline


NO_STATE = (
    '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict; pass what optim_state_dict() '
    "has returned"
)
