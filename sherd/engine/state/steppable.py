"""Refuses, by name, the optimizers of torch.optim that cannot step shards, and state of another shape.

Torch would raise in the middle of the step, and name only the operation that DTensor does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Adafactor, Optimizer

from sherd.engine.state.parameter import ShardedParameter, as_sharded, name_of
from sherd.errors import OptimizerError, OptimStateError
from sherd.tensor.ragged import RaggedDTensor, local_part
from sherd.tensor.state_kind import StateKind, kind_of

_USE_OWNED = "shard with placement=Owned(), of which each tensor's owner steps it"
_NEEDS_EVEN = (
    "it joins all parameters in one line, whose elements would be on all ranks in turn; shard so that dim 0 of every "
    "parameter divides by the number of ranks, or replicate(model)"
)


def require_steppable(optimizer: Optimizer, record: ShardedParameter) -> None:
    """Raise `OptimizerError` if `optimizer` is of one of torch's own classes and cannot step `record`'s parameter.

    A subclass may step otherwise, so it is never refused.
    `test_what_is_refused_torch_cannot_step` tries each refusal on torch.
    """
    remedy = _remedy(type(optimizer), as_sharded(record.optimizer_param))
    if remedy is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot step {record.name}, of shape "
            f"{tuple(record.optimizer_param.shape)}, as it is sharded; {remedy}"
        )


def _remedy(kind: type[Optimizer], optimizer_param: DTensor) -> str | None:
    if kind not in _EXAMINED or optimizer_param.device_mesh.size() == 1:
        return None
    stock = not isinstance(optimizer_param, RaggedDTensor)
    sharded = any(not each.is_replicate() for each in optimizer_param.placements)
    if kind is LBFGS:
        return _NEEDS_EVEN if sharded and not (stock and _is_even(optimizer_param)) else None
    return _USE_OWNED if stock and sharded else None


_EXAMINED = (Adafactor, LBFGS)


def _is_even(optimizer_param: DTensor) -> bool:
    """Returns whether every rank holds equally many elements, which are consecutive."""
    divides = optimizer_param.ndim > 0 and optimizer_param.shape[0] % optimizer_param.device_mesh.size() == 0
    return all(
        each.is_replicate() or (isinstance(each, Shard) and each.dim == 0 and divides)
        for each in optimizer_param.placements
    )


def require_shapes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `OptimStateError` if `optimizer` is about to load a tensor of another shape where it keeps an element for
    each of a parameter's. torch does not compare them."""
    for group, given in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, key in zip(group["params"], given["params"], strict=False):
            kept, shape, local = optimizer.state.get(parameter, {}), parameter.shape, local_part(parameter).shape
            for name, value in state_dict["state"].get(key, {}).items():
                kinds = [kind_of(name, each, shape, local) for each in (kept.get(name), value)]
                if kinds == [StateKind.ELEMENTS, StateKind.OTHER] and value.shape != shape:
                    raise OptimStateError(
                        f"{name_of(parameter)}: its state {name!r} has shape {tuple(shape)}, and {tuple(value.shape)} "
                        "in what is loaded; load it into the model that it was saved from"
                    )
