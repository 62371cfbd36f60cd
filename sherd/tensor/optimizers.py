"""Ragged tensors in optimizers: the lists that foreach and fused optimizers step, and state that lies elsewhere.

A list may hold ragged tensors, DTensors of torch and plain tensors side by side; each kind is computed by itself.

torch cuts a full state dict into equal chunks (`set_optimizer_state_dict` with `full_state_dict=True`), and a user may
load unsharded tensors. Both are cut like the parameter: when they are loaded, or before the first step at the latest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import local_tensor, register_optimizer_step_pre_hook, spec_of, specs_of
from sherd.tensor.operands import broadcasts, common_owner, layouts_in, local_of, lone_value, mixed, piece_at
from sherd.tensor.own import OwnDTensor, places_at
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.places import Places
from sherd.tensor.ragged import RaggedDTensor, as_result, distribute_ragged, redistribute_to
from sherd.tensor.sharded import ShardedDTensor, by_torch, sharded_dtensor
from sherd.tensor.state_kind import StateKind, elementwise_keys, kind_of
from sherd.tensor.table import RAGGED, SHARDED, Args, Aten, Kwargs, first_list, is_in_place, is_list_of_tensors

OnLists = Callable[[Aten, Args, Kwargs], object]
ON_LISTS = ("_foreach_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@SHARDED.answers(*ON_LISTS)
@RAGGED.answers(*ON_LISTS)
def on_lists(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on the lists of this rank's pieces. Results, if there are any, are laid out as the first list is."""
    if is_in_place(func):
        torch.autograd.graph.increment_version(first_list(args))
    return by_kind(_on_pieces, func, args, kwargs)


def by_kind(answer: OnLists, func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Let `answer` compute the parts of the lists that are of one class of ours, and torch the rest."""
    first = first_list(args)
    if len(set(map(type, first))) == 1 and isinstance(first[0], OwnDTensor):
        return answer(func, args, kwargs)
    kinds = [_kind_of(tensor) for tensor in first]
    found: dict[int, torch.Tensor] = {}
    made: Any
    for kind in (RaggedDTensor, ShardedDTensor, DTensor, torch.Tensor):
        chosen = [index for index, other in enumerate(kinds) if other is kind]
        if not chosen:
            continue
        pick = partial(_picked, chosen=chosen, length=len(first), kind=kind)
        picked, named = tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}
        if issubclass(kind, OwnDTensor):
            made = answer(func, picked, named)
        else:
            for layout in layouts_in(picked, {}):
                raise mixed(func, layout, first[chosen[0]])
            made = by_torch(func, picked, named)
        found |= zip(chosen, made or (), strict=False)
    return [found[index] for index in range(len(first))] if found else None


def _kind_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    if isinstance(tensor, RaggedDTensor):
        return RaggedDTensor
    return type(tensor) if type(tensor) in (ShardedDTensor, DTensor) else torch.Tensor


def _picked(value: object, chosen: list[int], length: int, kind: type[torch.Tensor]) -> object:
    """Returns the chosen items of a list of `length`; anything else as it is, but for plain tensors the number itself
    of a replicated DTensor, which they cannot meet."""
    if isinstance(value, list | tuple) and len(value) == length:
        return [value[index] for index in chosen]
    one = lone_value(value) if kind is torch.Tensor else None
    return value if one is None else one


def _on_pieces(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on lists of this rank's pieces, if all that meet lie alike. The tensors of the first list are of one
    class of ours."""
    first = first_list(args)
    otherwise = _on_runs if isinstance(first[0], RaggedDTensor) else by_torch
    places = list(map(places_at, first))

    def operand(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            one = lone_value(given)
            return None if one is None else one.reshape(())
        return _pieces_at(given, places) if is_list_of_tensors(given) else given

    own_args, own_kwargs = [operand(each) for each in args], {key: operand(each) for key, each in kwargs.items()}
    given = zip((*own_args, *own_kwargs.values()), (*args, *kwargs.values()), strict=True)
    if any(own is None and value is not None for own, value in given):
        return otherwise(func, args, kwargs)
    results = func(*own_args, **own_kwargs)
    if results is None or is_in_place(func):
        return None
    if any(result.shape != local.shape for result, local in zip(results, map(local_tensor, first), strict=True)):
        return otherwise(func, args, kwargs)  # one value of each tensor
    return [each.around(result) for each, result in zip(first, results, strict=True)]


def _pieces_at(values: Sequence[Any], places: Sequence[Places]) -> list[Any] | None:
    """Returns `piece_at` for each of a list, or None if the elements of one are elsewhere."""
    if all(issubclass(kind, OwnDTensor) for kind in set(map(type, values))) and list(map(places_at, values)) == places:
        return list(map(local_tensor, values))
    if len(values) != len(places):
        return None
    found = [piece_at(value, each) for value, each in zip(values, places, strict=True)]
    return None if any(each is None for each in found) else found


def _on_runs(func: Aten, args: Args, kwargs: Kwargs) -> Sequence[torch.Tensor] | None:
    """Compute where tensors of other lists lie elsewhere than those of the first, one by one."""
    first = first_list(args)
    layouts = [layout_of(spec) for spec in specs_of(first)]

    def operand(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            raise mixed(func, layouts[0], given)
        if not is_list_of_tensors(given):
            return given
        return [
            local_tensor(value) if _meets_at_owner(value, layout) else local_of(value, layout, func)
            for value, layout in zip(given, layouts, strict=True)
        ]

    results = func(*map(operand, args), **{key: operand(value) for key, value in kwargs.items()})
    if results is None or is_in_place(func):
        return None
    return [as_result(local, layout) for local, layout in zip(results, layouts, strict=True)]


def _meets_at_owner(value: object, expected: Layout) -> bool:
    """Returns True if `value` and the other tensor are at one owner, and it broadcasts to the other's shape there."""
    if not isinstance(value, RaggedDTensor) or not broadcasts(value.shape, expected.shape):
        return False
    return common_owner([layout_of(spec_of(value)), expected]) is not None


# State that lies elsewhere than its parameter

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def adopt_state(optimizer: Optimizer) -> None:
    """Cut the state of ragged parameters as they are. DTensors of torch, as files bring them, become ours. All ranks
    must call it, as it may gather.

    The state of a scalar, which torch leaves plain, becomes a DTensor with a copy on every rank, as the scalar is.
    """
    states = [(parameter, state) for parameter, state in optimizer.state.items() if isinstance(parameter, DTensor)]
    elementwise = elementwise_keys(states)
    for parameter, state in states:
        layout = layout_of(spec_of(parameter)) if isinstance(parameter, RaggedDTensor) else None
        for key, value in state.items():
            kind = kind_of(key, value, parameter.shape, None, elementwise)
            if kind not in (StateKind.ELEMENTS, StateKind.OTHER) or isinstance(value, RaggedDTensor):
                continue
            if layout is not None:
                state[key] = _cut(value, layout)
            elif type(value) is DTensor:
                state[key] = sharded_dtensor(local_tensor(value), spec_of(value))
            elif not parameter.ndim and not isinstance(value, DTensor) and kind is StateKind.ELEMENTS:
                state[key] = sharded_dtensor(value, spec_of(parameter))


def _cut(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns state cut as the parameter is, if it has the parameter's shape; else only at an owner."""
    shape = tuple(value.shape)
    is_elsewhere = isinstance(value, DTensor) and value.device_mesh != layout.mesh
    if is_elsewhere or not (shape == layout.shape or (shape and layout.owner is not None)):
        return value
    spec = layout.like(layout.cut if shape == layout.shape else layout.owned_cut(shape)).spec(value.dtype)
    return redistribute_to(value, spec) if isinstance(value, DTensor) else distribute_ragged(value, spec).clone()


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if optimizer not in _known:
        _known.add(optimizer)
        optimizer.register_load_state_dict_post_hook(adopt_state)
        adopt_state(optimizer)


register_optimizer_step_pre_hook(_before_step)
