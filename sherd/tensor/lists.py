"""What do operations on lists of tensors do: foreach and fused optimizers? The same, on the lists of this rank's runs.

A list may hold ragged tensors, DTensors of torch and plain tensors side by side; each kind is computed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec, dtensor_of, local_tensor, local_tensors, spec_of, specs_of
from sherd.tensor.operands import layouts_in, local_of, lone_value, mixed
from sherd.tensor.owned import common_owner
from sherd.tensor.placement import layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.table import Args, Kwargs, answers, is_in_place


@answers("_foreach_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def on_lists(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do it on this rank's runs. Results, if it gives any, are laid out as the first list is."""
    return by_kind(_on_runs, func, args, kwargs)


def by_kind(on_runs: Callable[[Any, Args, Kwargs], Any], func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Give the ragged part of the lists to `on_runs`, and the rest back to torch."""
    first = first_list(args)
    if _all_ragged(first):
        return on_runs(func, args, kwargs)
    results: list[Any] = [None] * len(first)
    gives = False
    for kind in (RaggedDTensor, DTensor, torch.Tensor):
        chosen = [index for index, each in enumerate(first) if _kind_of(each) is kind]
        if not chosen:
            continue
        picked = tuple(_picked(each, chosen, len(first)) for each in args)
        named = {key: _picked(each, chosen, len(first)) for key, each in kwargs.items()}
        if kind is torch.Tensor:
            picked, named = tuple(map(_plain, picked)), {key: _plain(each) for key, each in named.items()}
        if kind is not RaggedDTensor:
            _refuse_ragged(func, picked, first[chosen[0]])
        made = on_runs(func, picked, named) if kind is RaggedDTensor else func(*picked, **named)
        gives = gives or made is not None
        for index, each in zip(chosen, made or [], strict=False):
            results[index] = each
    return results if gives else None


def _refuse_ragged(func: Any, args: Args, first: torch.Tensor) -> None:
    for layout in layouts_in(args, {}):
        raise mixed(func, layout, first)


def first_list(args: Args) -> list[Any]:
    """The first list of tensors, which the results are like."""
    for each in args:
        if isinstance(each, list | tuple):
            return list(each)
    raise AssertionError("an operation on lists without a list")


def _kind_of(tensor: torch.Tensor) -> type:
    if isinstance(tensor, RaggedDTensor):
        return RaggedDTensor
    return DTensor if type(tensor) is DTensor else torch.Tensor


def _picked(value: Any, chosen: list[int], length: int) -> Any:
    is_parallel = isinstance(value, list | tuple) and len(value) == length
    return [value[index] for index in chosen] if is_parallel else value


def _plain(value: Any) -> Any:
    """A lone value that came as a replicated DTensor, for plain tensors."""
    if isinstance(value, DTensor) and not isinstance(value, RaggedDTensor):
        one = lone_value(value)
        return value if one is None else one
    return value


def _on_runs(func: Any, args: Args, kwargs: Kwargs) -> Any:
    first = first_list(args)
    specs = specs_of(first)
    local_args = [_local_of(each, first, specs, func) for each in args]
    local_kwargs = {key: _local_of(each, first, specs, func) for key, each in kwargs.items()}
    results = func(*local_args, **local_kwargs)
    if results is None or is_in_place(func):
        return None
    return [_like(local, spec) for local, spec in zip(results, specs, strict=True)]


def _local_of(given: Any, first: list[RaggedDTensor], specs: list[DTensorSpec], func: Any) -> Any:
    """What this rank computes with: the runs of a list whose tensors lie as those of the first list do, one by one."""
    if isinstance(given, torch.Tensor):
        one = lone_value(given)
        if one is None:
            raise mixed(func, layout_of(specs[0]), given)
        return one.reshape(())
    if not isinstance(given, list | tuple) or not given or not isinstance(given[0], torch.Tensor):
        return given
    if not _all_ragged(given):
        # The step counts of optimizers, or scalars to multiply by.
        return [local_of(each, layout_of(spec), func) for each, spec in zip(given, specs, strict=True)]
    if given is not first and specs_of(given) != specs:
        return [
            local_tensor(each) if _may_meet(each, like) else local_of(each, layout_of(spec), func)
            for each, like, spec in zip(given, first, specs, strict=True)
        ]
    return local_tensors(given)


def _all_ragged(tensors: Sequence[Any]) -> bool:
    kinds = set(map(type, tensors))
    return bool(kinds) and all(issubclass(kind, RaggedDTensor) for kind in kinds)


def _may_meet(each: RaggedDTensor, like: RaggedDTensor) -> bool:
    """Whether the pieces of both lie alike, or are at one owner, and one broadcasts to the other's shape there."""
    layout, expected = layout_of(spec_of(each)), layout_of(spec_of(like))
    if layout.same_as(expected):
        return True
    sizes = zip(layout.shape, expected.shape, strict=False)
    broadcasts = each.ndim == like.ndim and all(size in (1, wanted) for size, wanted in sizes)
    return broadcasts and common_owner([layout, expected]) is not None


def _like(local: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
    if local.dtype is not spec.tensor_meta.dtype:  # type: ignore[union-attr]  # set by dtensor_spec
        spec = layout_of(spec).spec(local.dtype)
    return dtensor_of(RaggedDTensor, local, spec, False)
