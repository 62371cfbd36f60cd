"""Operations on tensors in equal chunks that treat each element by itself, done on this rank's chunk."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.tensor.elementwise import ALSO_ELEMENTWISE, filled_where
from sherd.tensor.operands import lone_value
from sherd.tensor.placement import places_of
from sherd.tensor.places import Places
from sherd.tensor.sharded import ShardedDTensor, by_torch, sharded_dtensor
from sherd.tensor.table import SHARDED, Args, Aten, Kwargs, first_list, is_in_place, is_list_of_tensors, tensors_among


@SHARDED.answers("pointwise", "copy_", *ALSO_ELEMENTWISE)
def elementwise(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on this rank's chunk, if all operands lie alike or are one value; else have torch compute."""
    first = next((value for value in args if isinstance(value, ShardedDTensor)), None)
    if first is None or any(True for _ in tensors_among(kwargs.values())):
        return by_torch(func, args, kwargs)
    places = places_of(spec_of(first))
    operands: list[object] = []
    for value in args:
        operand = chunk_of(value, places)
        if operand is None and value is not None:
            return by_torch(func, args, kwargs)
        operands.append(operand)
    in_place = is_in_place(func)
    if (in_place and args[0] is not first) or not _keeps_strides(places, kwargs):
        return by_torch(func, args, kwargs)
    result = func(*operands, **kwargs)
    if in_place:
        return args[0]
    if isinstance(result, list | tuple):
        return type(result)(_placed(each, places) for each in result)
    return _placed(result, places)


SHARDED.answers("index_put_")(functools.partial(filled_where, otherwise=by_torch))


def _keeps_strides(places: Places, kwargs: Kwargs) -> bool:
    asked = kwargs.get("memory_format")
    return asked in (None, torch.preserve_format) or (asked is torch.contiguous_format and places.strides is None)


def _placed(result: object, places: Places) -> object:
    return sharded_dtensor(result, places.spec(result.dtype)) if isinstance(result, torch.Tensor) else result


def chunk_of(value: object, places: Places) -> object:
    """Returns what this rank computes with in place of `value`: its chunk of a tensor that lies as `places`, the value
    of a scalar, anything else that is no tensor as it is. None if its elements are elsewhere."""
    if isinstance(value, DTensor):
        spec = spec_of(value)
        if spec.__dict__.get("sherd_places") is places or places.same_as(places_of(spec)):
            return local_tensor(value)
        one = lone_value(value)
        return one if one is not None and one.ndim <= len(places.shape) else None
    if isinstance(value, torch.Tensor):
        return value if value.ndim == 0 else None
    return None if is_list_of_tensors(value) else value


def chunks_of(values: Sequence[Any], places: Sequence[Places]) -> list[Any] | None:
    """Returns `chunk_of` for each of a list, or None if the elements of one are elsewhere."""
    if set(map(type, values)) == {ShardedDTensor} and list(map(_places, values)) == places:
        return list(map(local_tensor, values))
    if len(values) != len(places):
        return None
    found = [chunk_of(value, each) for value, each in zip(values, places, strict=True)]
    return None if any(each is None for each in found) else found


_places: Callable[[ShardedDTensor], Places] = operator.attrgetter("_spec.sherd_places")


def on_chunks(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on lists of this rank's chunks, if all that meet lie alike; else have torch compute. The first list is of
    `ShardedDTensor`s."""
    first = first_list(args)
    places = list(map(_places, first))

    def operand(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return lone_value(given)
        return chunks_of(given, places) if is_list_of_tensors(given) else given

    own_args, own_kwargs = [operand(each) for each in args], {key: operand(each) for key, each in kwargs.items()}
    given = zip((*own_args, *own_kwargs.values()), (*args, *kwargs.values()), strict=True)
    if any(own is None and value is not None for own, value in given):
        return by_torch(func, args, kwargs)
    results = func(*own_args, **own_kwargs)
    if results is None or is_in_place(func):
        return None
    if any(result.shape != local.shape for result, local in zip(results, map(local_tensor, first), strict=True)):
        return by_torch(func, args, kwargs)  # one value of each tensor
    return [sharded_dtensor(each, at.spec(each.dtype)) for each, at in zip(results, places, strict=True)]
