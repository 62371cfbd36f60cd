"""Our tensors in optimizers: the lists that foreach and fused optimizers step, and state with other placements.

A list may hold ragged tensors, DTensors of torch and plain tensors side by side; each class is computed by itself.

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
from sherd.tensor.placement import Layout, Places, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result, distribute_ragged, redistribute_to
from sherd.tensor.sharded import OwnDTensor, ShardedDTensor, by_torch, places_at, sharded_dtensor
from sherd.tensor.state_kind import StateKind, elementwise_keys, kind_of
from sherd.tensor.table import RAGGED, SHARDED, Args, Aten, Kwargs, first_list, is_in_place, is_list_of_tensors

OnLists = Callable[[Aten, Args, Kwargs], object]
ON_LISTS = ("_foreach_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@SHARDED.answers(*ON_LISTS)
@RAGGED.answers(*ON_LISTS)
def on_lists(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on the lists of this rank's pieces. Results have the places of the first list."""
    if is_in_place(func):
        torch.autograd.graph.increment_version(first_list(args))
    return by_kind(_on_pieces, func, args, kwargs)


def by_kind(answer: OnLists, func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Let `answer` compute the parts of the lists that are of one class of ours, and torch the rest."""
    first = first_list(args)
    if len(set(map(type, first))) == 1 and isinstance(first[0], OwnDTensor):
        return answer(func, args, kwargs)
    classes = [_class_of(tensor) for tensor in first]
    results: dict[int, torch.Tensor] = {}
    answers: Any
    for tensor_class in (RaggedDTensor, ShardedDTensor, DTensor, torch.Tensor):
        chosen = [index for index, other in enumerate(classes) if other is tensor_class]
        if not chosen:
            continue
        pick = partial(_picked, chosen=chosen, length=len(first), is_plain=tensor_class is torch.Tensor)
        picked, named = tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}
        if issubclass(tensor_class, OwnDTensor):
            answers = answer(func, picked, named)
        else:
            for layout in layouts_in(picked, {}):
                raise mixed(func, layout, first[chosen[0]])
            answers = by_torch(func, picked, named)
        results |= zip(chosen, answers or (), strict=False)
    return [results[index] for index in range(len(first))] if results else None


def _class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    if isinstance(tensor, RaggedDTensor):
        return RaggedDTensor
    return type(tensor) if type(tensor) in (ShardedDTensor, DTensor) else torch.Tensor


def _picked(value: object, chosen: list[int], length: int, is_plain: bool) -> object:
    """Returns the chosen items of a list of `length`, and any other value unchanged."""
    if isinstance(value, list | tuple) and len(value) == length:
        return [value[index] for index in chosen]
    # Plain tensors cannot meet a replicated DTensor, only its number.
    one = lone_value(value) if is_plain else None
    return value if one is None else one


def _on_pieces(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on lists of this rank's pieces, if tensors that meet have the same places."""
    first = first_list(args)
    otherwise = _on_runs if isinstance(first[0], RaggedDTensor) else by_torch
    places = list(map(places_at, first))

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            one = lone_value(value)
            return None if one is None else one.reshape(())
        return _pieces_at(value, places) if is_list_of_tensors(value) else value

    own_args, own_kwargs = [operand(each) for each in args], {key: operand(each) for key, each in kwargs.items()}
    pairs = zip((*own_args, *own_kwargs.values()), (*args, *kwargs.values()), strict=True)
    if any(own is None and value is not None for own, value in pairs):
        return otherwise(func, args, kwargs)
    results = func(*own_args, **own_kwargs)
    if results is None or is_in_place(func):
        return None
    if any(result.shape != local.shape for result, local in zip(results, map(local_tensor, first), strict=True)):
        return otherwise(func, args, kwargs)  # one value of each tensor
    return [each.around(result) for each, result in zip(first, results, strict=True)]


def _pieces_at(values: Sequence[Any], places: Sequence[Places]) -> list[Any] | None:
    """Returns `piece_at` of each value. None: the elements of a value are elsewhere."""
    # Places of tensors that lie alike are one object, so this comparison of lists is quick.
    classes = set(map(type, values))
    if all(issubclass(each, OwnDTensor) for each in classes) and list(map(places_at, values)) == places:
        return list(map(local_tensor, values))
    if len(values) != len(places):
        return None
    pieces = [piece_at(value, each) for value, each in zip(values, places, strict=True)]
    return None if any(piece is None for piece in pieces) else pieces


def _on_runs(func: Aten, args: Args, kwargs: Kwargs) -> Sequence[torch.Tensor] | None:
    """Compute on lists of runs whose tensors have other places than those of the first list."""
    first = first_list(args)
    layouts = [layout_of(spec) for spec in specs_of(first)]

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise mixed(func, layouts[0], value)
        if not is_list_of_tensors(value):
            return value
        return [
            local_tensor(each) if _meets_at_owner(each, layout) else local_of(each, layout, func)
            for each, layout in zip(value, layouts, strict=True)
        ]

    results = func(*map(operand, args), **{key: operand(value) for key, value in kwargs.items()})
    if results is None or is_in_place(func):
        return None
    return [as_result(local, layout) for local, layout in zip(results, layouts, strict=True)]


def _meets_at_owner(value: object, expected: Layout) -> bool:
    """Returns True if `value` is at the owner of the expected layout, and broadcasts to its shape."""
    if not isinstance(value, RaggedDTensor) or not broadcasts(value.shape, expected.shape):
        return False
    return common_owner([layout_of(spec_of(value)), expected]) is not None


# State with other placements than its parameter

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def adopt_state(optimizer: Optimizer) -> None:
    """Cut the state of ragged parameters as the parameters are cut. All ranks must call it, as it may gather.

    DTensors of torch, as files bring them, become ours. The state of a scalar, which torch leaves plain, becomes a
    DTensor with a copy on every rank, like the scalar.
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
    """Returns state of the parameter's shape cut like the parameter; state of another shape is cut at an owner only."""
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
