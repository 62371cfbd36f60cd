"""The pieces of a state that is loaded, and the broadcast of a state that only rank 0 has.

Rank 0 sends an outline of its state at once, and each tensor when all ranks ask for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec
from sherd.checkpoint.catalog import StateDict
from sherd.comm.failures import named
from sherd.comm.mesh import default_device_type
from sherd.comm.objects import broadcast_object
from sherd.errors import OptimStateError


class Given(Protocol):
    """One piece of a state that is loaded. All ranks ask for the same pieces, in the same order."""

    @property
    def shape(self) -> torch.Size | None:
        """The shape of a tensor; None for anything else."""

    def take(self, spec: DTensorSpec | None) -> torch.Tensor | None:
        """Returns the tensor, uncopied; None if it is none. `spec` is how it is wanted: it may be a DTensor that lies
        so."""

    def copied(self) -> object:
        """Returns a copy in memory of its own."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor that rank 0 has. On other ranks `tensor` is None."""

    shape: torch.Size
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    tensor: torch.Tensor | None

    def take(self, spec: DTensorSpec | None = None) -> torch.Tensor:
        """Broadcast the tensor. All ranks must call it."""
        device = torch.device(default_device_type(self.group))
        if self.tensor is None:
            here = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            here = self.tensor.detach().to(device).contiguous()
        with named("rank 0's broadcast of optimizer state", self.group):
            dist.broadcast(here, group=self.group, group_src=0)
        return here if self.shape else here.cpu()  # optimizers read a count of steps on the host

    copied = take


@dataclass(frozen=True, slots=True)
class Filed:
    """A tensor in a checkpoint's file. `read` returns it; given a spec, of this rank's part alone."""

    shape: torch.Size
    read: Callable[[DTensorSpec | None], torch.Tensor]

    def take(self, spec: DTensorSpec | None) -> torch.Tensor:
        """Read the tensor, or the part of it that `spec` gives to this rank."""
        return self.read(spec if spec is not None and spec.shape == self.shape else None)

    def copied(self) -> torch.Tensor:
        """Read the tensor."""
        return self.read(None)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that this rank has."""

    tensor: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.tensor.shape

    def take(self, spec: DTensorSpec | None = None) -> torch.Tensor:
        """Returns the tensor itself."""
        return self.tensor

    def copied(self) -> torch.Tensor:
        """Returns a copy outside autograd."""
        return self.tensor.detach().clone()


@dataclass(frozen=True, slots=True)
class Other:
    """Any other value."""

    value: object
    shape: ClassVar[None] = None

    def take(self, spec: DTensorSpec | None = None) -> None:
        """Returns None: the value is no tensor."""

    def copied(self) -> object:
        """Returns a deep copy."""
        return copy.deepcopy(self.value)


def given(value: object) -> Given:
    """Returns `value` as a piece of a state: a tensor, one that rank 0 sends, or anything else."""
    if isinstance(value, Sent | Filed):
        return value
    return Held(value) if isinstance(value, torch.Tensor) else Other(value)


def mapped(value: object, change: Callable[[object], object]) -> object:
    """Returns `value` with `change` of all that is in it, if it is a dict or a dict of dicts; else `change(value)`."""
    return {key: mapped(item, change) for key, item in value.items()} if isinstance(value, dict) else change(value)


def require_state(state_dict: StateDict | None) -> StateDict:
    """Returns `state_dict`. Raises `OptimStateError` if it has no "state"."""
    if not isinstance(state_dict, dict) or "state" not in state_dict:
        raise OptimStateError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict; pass what '
            "optim_state_dict() has returned"
        )
    return state_dict


def from_rank0(state_dict: StateDict | None, group: dist.ProcessGroup | None) -> StateDict:
    """Returns the `state_dict` of rank 0 of `group`, with a `Sent` for each tensor. All ranks of `group` must call it.

    Raises:
        OptimStateError: it has no "state", or it has DTensors, of which rank 0 has only a part. On all ranks.
    """
    tensors: list[torch.Tensor] = []
    error, outline = "", {}
    if dist.get_rank(group) == 0:
        try:
            outline = _outlined(require_state(state_dict), tensors)
        except OptimStateError as raised:
            error = str(raised)
    error, outline = broadcast_object((error, outline), "rank 0's broadcast of optimizer state", group)
    if error:
        raise OptimStateError(error)

    def sent(value: object) -> object:
        if not isinstance(value, _Tensor):
            return value
        return Sent(value.shape, value.dtype, group, tensors[value.index] if tensors else None)

    return {**outline, "state": mapped(outline["state"], sent)}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in the outline; `index` is its number among all tensors of rank 0's state."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


def _outlined(state_dict: StateDict, tensors: list[torch.Tensor]) -> StateDict:
    """Returns `state_dict` without the data of its tensors, and appends these to `tensors`."""

    def outline(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _Tensor(len(tensors) - 1, value.shape, value.dtype)

    states = {}
    for name, state in state_dict["state"].items():
        first = len(tensors)
        states[name] = mapped(state, outline)
        if any(isinstance(tensor, DTensor) for tensor in tensors[first:]):
            raise OptimStateError(
                f"{name}: rank 0 has DTensors, of which it holds a part, and rank0_only asks for whole tensors from "
                "it; save with the full state dict type, or load on all ranks"
            )
    return {**state_dict, "state": states}
