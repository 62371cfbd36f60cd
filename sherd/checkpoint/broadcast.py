"""How do all ranks get a state that only rank 0 has? Its outline at once, then each tensor when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd.comm.failures import named
from sherd.comm.mesh import default_device_type
from sherd.comm.objects import broadcast_object
from sherd.errors import OptimStateError


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor of rank 0; `tensor` is None on the others."""

    shape: torch.Size
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    tensor: torch.Tensor | None

    def take(self) -> torch.Tensor:
        """The tensor, on every rank. All must call it, for the same tensors in the same order."""
        device = torch.device(default_device_type(self.group))
        if self.tensor is None:
            here = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            here = self.tensor.detach().to(device).contiguous()
        with named("rank 0's broadcast of optimizer state", self.group):
            dist.broadcast(here, group=self.group, group_src=0)
        return here if self.shape else here.cpu()  # a count of steps, which optimizers read


def from_rank0(state_dict: dict[str, Any] | None, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """`state_dict` of rank 0 of `group` on all of its ranks, a `Sent` for each tensor. All must call it.

    Raises:
        OptimStateError: it has no "state", or DTensors in it, of which rank 0 has only a part. On all ranks.
    """
    is_source = dist.get_rank(group) == 0
    outline = _outlined(state_dict) if is_source else None
    told = broadcast_object(outline, "rank 0's broadcast of optimizer state", group)
    if isinstance(told, str):
        raise OptimStateError(told)
    assert isinstance(told, dict), "rank 0 sends an outline or what is wrong"
    given = state_dict if is_source and state_dict is not None else {"state": {}}
    sent = {name: _taken_up(state, given["state"].get(name), group) for name, state in told["state"].items()}
    return {**told, "state": sent}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the others are told of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def _outlined(state_dict: dict[str, Any] | None) -> dict[str, Any] | str:
    """What there is besides tensors; or what is wrong with it, for all ranks to say."""
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


def _without_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tensors(each) for key, each in value.items()}
    return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _taken_up(told: Any, given: Any, group: dist.ProcessGroup | None) -> Any:
    if isinstance(told, dict):
        return {key: _taken_up(each, None if given is None else given[key], group) for key, each in told.items()}
    return Sent(told.shape, told.dtype, group, given) if isinstance(told, _Tensor) else told


NO_STATE = (
    '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict; pass what optim_state_dict() '
    "has returned"
)
