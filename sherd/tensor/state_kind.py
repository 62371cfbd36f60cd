"""The kinds of optimizer state: elements of its parameter, one number such as a count of steps, or neither.

An optimizer does not say which state belongs to the elements of a parameter, to be cut, gathered and merged like the
parameter. Shapes tell, except for a scalar parameter: its momentum and its count of steps look alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec

State = dict[str, Any]
"""The state that an optimizer keeps for one parameter, by key."""

COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys under which the optimizers of torch keep one number for a parameter, even for a scalar one."""


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state."""


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer of full matrices: it steps the members of flat parameters, and places some of its state itself."""

    def spec_of_state(self, parameter: torch.Tensor, key: str, shape: torch.Size) -> DTensorSpec | None:
        """Returns where the state under `key`, of unsharded `shape`, belongs; None: where every optimizer's does."""


class StateKind(Enum):
    """The kind of one entry of a parameter's state."""

    ELEMENTS = auto()
    """A tensor with an element for each element of the parameter, such as a momentum."""
    NUMBER = auto()
    """A tensor without dimensions that belongs to the entire parameter, such as a count of steps."""
    OTHER = auto()
    """A tensor of another shape."""
    NO_TENSOR = auto()
    """Any other object."""


def state_kind(
    key: str,
    value: object,
    shape: torch.Size,
    local_shape: torch.Size | None = None,
    elementwise_keys: Collection[str] = (),
) -> StateKind:
    """Returns the kind of `value`, which an optimizer keeps under `key` for one parameter.

    Args:
        key: the name of this entry of state. It decides for a scalar tensor of a scalar parameter.
        value: the entry of state.
        shape: the unsharded shape of the parameter. DTensors of this shape have its elements.
        local_shape: the shape of a plain tensor that has the elements: None for `shape`, in a state dict of unsharded
            tensors; the shape of this rank's shard in the state of an optimizer that steps.
        elementwise_keys: keys that are known to hold elements, whatever their names say.
    """
    if isinstance(value, DTensor):
        return StateKind.ELEMENTS if value.shape == shape else StateKind.OTHER
    if not isinstance(value, torch.Tensor):
        return StateKind.NO_TENSOR
    if value.dim():
        return StateKind.ELEMENTS if value.shape == (shape if local_shape is None else local_shape) else StateKind.OTHER
    belongs_to_element = not shape and (key in elementwise_keys or key not in COUNTS)
    return StateKind.ELEMENTS if belongs_to_element else StateKind.NUMBER


def elementwise_keys(states: Iterable[tuple[torch.Tensor, State]]) -> set[str]:
    """Returns the keys of tensors with dims of parameters with dims. They hold elements of scalar parameters, too."""
    return {
        key
        for parameter, state in states
        if parameter.ndim
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    }


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
