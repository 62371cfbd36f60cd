"""Refuses, by name, the optimizers of torch.optim that cannot step shards, and state of another shape.

Torch would raise in the middle of the step, and name only the operation that DTensor does not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Optimizer, Rprop

from sherd.engine.state.parameter import ShardedParameter, as_sharded, name_of
from sherd.errors import OptimizerError, OptimStateError
from sherd.tensor.ragged import RaggedDTensor, local_part
from sherd.tensor.state_kind import StateKind, kind_of

_USE_FLAT = "shard with placement=Flat(), of which it steps this rank's run, or flatten_optimizer(optimizer)"
_USE_OWNED = "shard with placement=Owned(), of which each tensor's owner steps it"
_NOT_FUSED = "leave out fused=True, or shard with placement=Flat()"
_NEEDS_EVEN = (
    "it joins all parameters in one line, whose elements would be on all ranks in turn; shard so that dim 0 of every "
    "parameter divides by the number of ranks, or replicate(model)"
)


def require_steppable(optimizer: Optimizer, group: Mapping[str, object], record: ShardedParameter) -> None:
    """Raise `OptimizerError` if `optimizer` is of one of torch's own classes and cannot step `record`'s parameter.

    `group` is the parameter's group in the optimizer. A subclass may step otherwise, so it is never refused.
    `test_what_is_refused_torch_cannot_step` tries each refusal on torch.
    """
    remedy = _remedy(type(optimizer), group, as_sharded(record.optimizer_param))
    if remedy is not None:
        form = "(fused=True)" if remedy is _NOT_FUSED else ""
        raise OptimizerError(
            f"{type(optimizer).__name__}{form} cannot step {record.name}, of shape "
            f"{tuple(record.optimizer_param.shape)}, as it is sharded; {remedy}"
        )


def require_alike(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raise `OptimizerError` if `optimizer`, of torch's classes, steps lists of plain parameters and torch's DTensors.
    Those with ragged tensors are computed kind by kind."""
    trained = [each for each in group["params"] if each.requires_grad]
    kinds = {RaggedDTensor if isinstance(each, RaggedDTensor) else isinstance(each, DTensor) for each in trained}
    form = next((form for form in ("foreach", "fused") if group.get(form)), None)
    if form and kinds == {True, False} and type(optimizer).__module__.startswith("torch.optim"):
        raise OptimizerError(
            f"{type(optimizer).__name__}({form}=True) steps plain parameters (ignored ones?) and shards in one group, "
            f"of which torch makes one list and fails; give each kind a group of its own, or {form}=False"
        )


def _remedy(kind: type[Optimizer], group: Mapping[str, object], optimizer_param: DTensor) -> str | None:
    if kind not in _EXAMINED or optimizer_param.device_mesh.size() == 1:
        return None
    stock = not isinstance(optimizer_param, RaggedDTensor)
    sharded = any(not each.is_replicate() for each in optimizer_param.placements)
    if kind is LBFGS:
        return _NEEDS_EVEN if sharded and not (stock and _is_even(optimizer_param)) else None
    if not stock or not sharded:
        return None
    if kind in (SGD, Adagrad):
        return _NOT_FUSED if group.get("fused") else None
    return _USE_FLAT if kind is Rprop else _USE_OWNED


_EXAMINED = (SGD, Adagrad, Rprop, Adafactor, LBFGS)


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
