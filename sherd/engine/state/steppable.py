"""Refuse, by name and before the step, optimizers of torch.optim that cannot step shards: torch would name only the
operation that it has no answer for."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Optimizer, Rprop

from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import OptimizerError
from sherd.tensor.ragged import RaggedDTensor

_RUNS = "shard with placement=Flat(), of which it steps this rank's run, or flatten_optimizer(optimizer)"
_OWNER = "shard with placement=Owned(), of which each tensor's owner steps it"
_NOT_FUSED = "leave out fused=True, or shard with placement=Flat()"
_LINE = (
    "it joins all parameters in one line, whose elements would be on all ranks in turn; shard so that dim 0 of every "
    "parameter divides by the number of ranks, or replicate(model)"
)


def require_steppable(optimizer: Optimizer, group: dict[str, Any], record: ShardedParameter) -> None:
    """Raise `OptimizerError` if `optimizer`, of torch's own class, cannot step that parameter of `group`.

    A subclass may do otherwise and is not asked. What torch 2.13 cannot step is tested one by one
    (`test_what_is_refused_torch_cannot_step`).
    """
    remedy = _remedy(type(optimizer), group, record.optimizer_param)
    if remedy is not None:
        form = "(fused=True)" if remedy is _NOT_FUSED else ""
        raise OptimizerError(
            f"{type(optimizer).__name__}{form} cannot step {record.name}, of shape "
            f"{tuple(record.optimizer_param.shape)}, as it is sharded; {remedy}"
        )


def _remedy(kind: type[Optimizer], group: dict[str, Any], optimizer_param: Any) -> str | None:
    if kind not in _ASKED or not isinstance(optimizer_param, DTensor) or optimizer_param.device_mesh.size() == 1:
        return None
    stock = not isinstance(optimizer_param, RaggedDTensor)
    sharded = any(not each.is_replicate() for each in optimizer_param.placements)
    if kind is LBFGS:
        return _LINE if sharded and not (stock and _is_even(optimizer_param)) else None
    if not stock or not sharded:
        return None
    if kind in (SGD, Adagrad):
        return _NOT_FUSED if group.get("fused") else None
    return _RUNS if kind is Rprop else _OWNER


_ASKED = (SGD, Adagrad, Rprop, Adafactor, LBFGS)


def _is_even(optimizer_param: DTensor) -> bool:
    """Whether every rank has as many elements, one behind the other."""
    divides = optimizer_param.ndim > 0 and optimizer_param.shape[0] % optimizer_param.device_mesh.size() == 0
    return all(
        each.is_replicate() or (isinstance(each, Shard) and each.dim == 0 and divides)
        for each in optimizer_param.placements
    )
