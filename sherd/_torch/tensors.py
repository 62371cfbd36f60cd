"""Private names of plain tensors: their storage, their gradients, what users and torch write on parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch

from sherd._torch.writes import write_into

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing: results of a subclass with it are plain tensors. Private since 1.7."""


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of classes that see each operation beneath autograd while they are entered. torch documents it, under a
private module (2.0 to 2.13)."""


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and handles share the memory of the storage of this `_cdata`. No public name tells (2.11 to
2.13)."""


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradient of each of `tensors`.

    It does not ask each DTensor's `__torch_function__`, which takes longer than reading; the guard for that has no
    public name (2.11 to 2.13).
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad for tensor in tensors]


def attributes_of(parameter: torch.Tensor) -> dict[str, object]:
    """Returns the attributes that a user has written on a Parameter (`weight.no_decay = True`).

    It leaves out those of the class, those that torch.nn and Dynamo write under names of their own (2.11 to 2.13),
    hooks and gradients.
    """
    written = {
        name: value for name, value in vars(parameter).items() if name != "_is_param" and not name.startswith("_dynamo")
    }
    own = vars(parameter.detach()) if written and type(parameter) is not torch.nn.Parameter else {}
    return {name: value for name, value in written.items() if name not in own}


def give_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    """Write what `attributes_of` returned for one Parameter on the `tensor` that takes its place.

    A tensor cannot be made with them: torch has no constructor and no copy to another device that keeps the attributes
    of a user (2.11 to 2.13). So they are written here, by names that only the user knows.
    """
    for name, value in attributes.items():
        write_into(tensor, name, value)


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Returns whether `torch.distributed.optim._apply_optimizer_in_backward` gave `parameter` optimizers that step as
    soon as its gradient is there. They are in an attribute without a public name (1.13 to 2.13)."""
    return bool(getattr(parameter, "_in_backward_optimizers", ()))
