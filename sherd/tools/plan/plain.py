"""A plain copy of a sharded model on the meta device, as it was before it was sharded: for reading its work."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sherd.api.module import FSDPModule
from sherd.api.wrapper import FullyShardedDataParallel
from sherd.engine import BoundForward, Unit
from sherd.errors import UnsupportedError
from sherd.tensor.structures import tensors_in
from sherd.wrap.names import WRAPPED

_OURS = {*Unit.ATTRIBUTES, "_compiled_call_impl"}


def plain_copy(model: nn.Module) -> nn.Module:
    """Returns `model` without wrappers, sherd's classes and any hooks, with whole parameters on the meta device. No
    value is read, and the model may be in the middle of a step.

    Raises:
        UnsupportedError: a parameter is also cut over other axes (tensor parallelism), or a module holds what cannot be
            copied, as a process group.
    """
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in reversed(modules):  # those inside come before those around them
        inner = module._modules[WRAPPED] if isinstance(module, FullyShardedDataParallel) else None
        plain = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
        memo[id(module)] = object.__new__(plain) if inner is None else memo[id(inner)]
        memo |= {id(each): None for each in Unit.attached_to(module)}
        memo |= {id(each): _on_meta(each) for each in tensors_in(vars(module))}
    for module in modules:
        if not isinstance(module, FullyShardedDataParallel):
            own = {name: each for name, each in vars(module).items() if name not in _OURS and "_hooks" not in name}
            own = {name: each for name, each in own.items() if not isinstance(each, BoundForward)}
            try:
                copied_own = copy.deepcopy(own, memo)
            except Exception as error:
                kind = type(memo[id(module)]).__name__
                raise UnsupportedError(f"a {kind} of the model holds what cannot be copied: {error}") from error
            vars(memo[id(module)]).update(vars(nn.Module()) | copied_own)
    for record in (each for unit in Unit.below(model) for each in unit.parameters):
        if record.unsharded_spec is not None or record.restored is not None:
            raise UnsupportedError(f"{record.name} is also cut over other axes of ranks, which is not simulated")
        whole = nn.Parameter(torch.empty(record.shape, dtype=record.dtype, device="meta"), record.requires_grad)
        for place in record.places:
            if place.module_id in memo:
                vars(memo[place.module_id]).pop(place.attribute, None)
                memo[place.module_id]._parameters[place.attribute] = whole
    copied: nn.Module = memo[id(model)]
    return copied


def _on_meta(tensor: Tensor) -> Tensor:
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
