"""Tensors inside the containers that modules take and return: tuples, lists, dicts, namedtuples, dataclasses, and their
mixes.

torch's pytree takes a dataclass for a leaf unless it was registered, so the walk is our own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor changed; containers that hold a changed one are rebuilt, all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _map_mapping(change, value)
    if isinstance(value, (list, tuple)):
        new = [map_tensors(change, each) for each in value]
        if all(after is before for after, before in zip(new, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*new)
        return type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value)
    return value


def _map_mapping(change: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    new = {key: map_tensors(change, each) for key, each in value.items()}
    changed = {key: each for key, each in new.items() if each is not value[key]}
    if not changed:
        return value
    if type(value) is dict:
        return new
    # A dict with behaviour of its own (OrderedDict, a model's output class) is copied and filled.
    rebuilt: Any = copy.copy(value)
    for key, each in changed.items():
        rebuilt[key] = each
    return rebuilt


def _map_dataclass(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = map_tensors(change, before)
        if after is not before:
            changed[field.name] = after
    if not changed:
        return value
    # Copied and written, not made anew: __init__ may take other arguments than it has fields, and frozen ones refuse
    # setattr.
    rebuilt = copy.copy(value)
    for name, after in changed.items():
        object.__setattr__(rebuilt, name, after)
    return rebuilt
