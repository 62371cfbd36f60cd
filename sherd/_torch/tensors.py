"""Private names of plain tensors: their storage, their gradients, and attributes that are written on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of contexts that see each operation beneath autograd; documented, in a private module (2.0 to 2.15)."""


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and handles share the storage with this `_cdata`, which no public name says (to 2.15)."""


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradient of each of `tensors`.

    It passes by each DTensor's `__torch_function__`, which takes longer than the read; the guard has no public name
    (2.11 to 2.15).
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad for tensor in tensors]


REDUCES_IN_GRAD_DTYPE = torch.__version__ >= "2.15"  # compared as versions are, not as text
"""Whether torch's `fully_shard(reduce_dtype=None)` reduces in the parameters' `grad_dtype`, as since 2.15. Before, it
reduces in `param_dtype`; no name of torch says which."""


def grad_dtype_of(parameter: torch.Tensor) -> tuple[torch.dtype | None, ...]:
    """Returns the `grad_dtype` that was set on `parameter`, in a tuple, which is empty if none was.

    Before 2.15 one that is set to the dtype of the parameter cannot be told from none. No public name says (to 2.15).
    """
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype")  # noqa: B009  # which type stubs lack (to 2.14)
    is_set: bool = getattr(parameter, "_has_grad_dtype_override", dtype != parameter.dtype)
    return (dtype,) if is_set else ()


def set_grad_dtype(parameter: Any, dtype: torch.dtype | None) -> None:
    """Let `parameter.grad` have `dtype`, or any with None. The type stubs of torch lack the name (to 2.14)."""
    parameter.grad_dtype = dtype


chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""Row i of `chunk_cat(tensors, dim, num_chunks)` has chunk i of each tensor; no public name is one call (to 2.15)."""


def attributes_of(parameter: torch.Tensor) -> dict[str, object]:
    """Returns the attributes that a user has written on a Parameter (`weight.no_decay = True`).

    It leaves out hooks, gradients, attributes of the class, and those of torch.nn and Dynamo, which have names of their
    own (2.11 to 2.15).
    """
    written = {
        name: value for name, value in vars(parameter).items() if name != "_is_param" and not name.startswith("_dynamo")
    }
    own = vars(parameter.detach()) if written and type(parameter) is not torch.nn.Parameter else {}
    return {name: value for name, value in written.items() if name not in own}


def give_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    """Write the `attributes` of a Parameter on the `tensor` that takes its place.

    torch has no constructor and no copy to another device that keeps a user's attributes (2.11 to 2.15).
    """
    for name, value in attributes.items():
        write_into(tensor, name, value)


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Returns whether `parameter` has optimizers of torch that step as soon as its gradient is there.

    `torch.distributed.optim._apply_optimizer_in_backward` writes them in a private attribute (1.13 to 2.15).
    """
    return bool(getattr(parameter, "_in_backward_optimizers", ()))


def write_into(owner: object, name: str, value: object) -> None:
    """Write attribute `name` of an object of torch's or of a user's, whatever its class does with attributes.

    It serves functions of torch that are replaced, marks on modules, attributes that a Parameter takes over, and fields
    of a copied frozen dataclass. Type checkers do not know these names, so an assignment cannot be written. A search
    for `write_into` finds all of them.
    """
    object.__setattr__(owner, name, value)
