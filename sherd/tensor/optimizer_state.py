"""What if an optimizer was given state that lies elsewhere than its ragged parameters?

torch cuts a full state dict into equal chunks (`set_optimizer_state_dict` with `full_state_dict=True`), and a user may
load whole tensors. Both are cut like the parameter: when they are loaded, or before the first step at the latest.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import register_optimizer_step_pre_hook, spec_of
from sherd.layout.runs import Runs
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, distribute_ragged, redistribute_to
from sherd.tensor.state_kind import StateKind, kind_of

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def adopt_state(optimizer: Optimizer) -> None:
    """Cut the state of ragged parameters as the parameters are. All ranks must call it, as it may gather.

    A scalar's state, which torch leaves plain, becomes the copy on every rank that the scalar itself is.
    """
    # Of a scalar's state, what other parameters keep under the same key tells more than the key's name.
    elementwise_keys = {
        key
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, DTensor) and parameter.ndim
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for key, value in state.items():
            kind = kind_of(key, value, parameter.shape, None, elementwise_keys)
            if kind is StateKind.NUMBER or not isinstance(value, torch.Tensor):
                continue
            if isinstance(parameter, RaggedDTensor):
                if type(value) is not RaggedDTensor:
                    state[key] = _cut(value, layout_of(spec_of(parameter)))
            elif not parameter.ndim and not isinstance(value, DTensor) and kind is StateKind.ELEMENTS:
                state[key] = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)


def _cut(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    cut = _cut_for(tuple(value.shape), layout)
    if cut is None or (isinstance(value, DTensor) and value.device_mesh != layout.mesh):
        return value
    if isinstance(value, DTensor):
        return redistribute_to(value, layout.like(cut).spec(value.dtype))
    return distribute_ragged(value, layout.like(cut).spec(value.dtype)).clone()


def _cut_for(shape: tuple[int, ...], layout: Layout) -> Runs | None:
    """The parameter's cut for state of its shape; for other shapes there is one only at an owner."""
    if shape == layout.shape:
        return layout.cut
    return layout.owned_cut(shape) if shape and layout.owner is not None else None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _known:
        _known.add(optimizer)
        optimizer.register_load_state_dict_post_hook(adopt_state)
        adopt_state(optimizer)


register_optimizer_step_pre_hook(_before_step)
