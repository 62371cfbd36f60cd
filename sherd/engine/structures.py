"""Tensors inside the containers that modules take and return: tuples, lists, sets, dicts, namedtuples, dataclasses, and
their mixes.

torch's pytree takes a dataclass for a leaf unless it was registered, so the walk is our own.

Objects of a user's own classes are looked into for tensors (`tensors_within`), but never rebuilt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


OBJECTS_DEEP = 4
"""How many of a user's own objects, one in another, are looked into."""

_CLOSED = (str, bytes, int, float, complex, type(None), type, nn.Module)
"""What is not looked into: no tensor is in it, or more than a forward returns."""


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """As `tensors_in`, and every tensor among the attributes of objects that are no container, such as a class of the
    user's own that a forward returns."""
    yield from _within(value, OBJECTS_DEEP, set())


def _within(value: Any, deep: int, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _within(each, deep, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _within(each, deep, seen)
    elif not isinstance(value, _CLOSED) and deep and id(value) not in seen:
        seen.add(id(value))
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        for each in [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]:
            yield from _within(each, deep - 1, seen)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor changed; containers that hold a changed one are rebuilt, all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _map_mapping(change, value)
    if isinstance(value, (list, tuple, set, frozenset)):
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
