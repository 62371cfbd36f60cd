"""Tensors inside the containers that modules take and return: tuples, lists, sets, dicts, namedtuples, dataclasses.

torch's pytree takes a dataclass for a leaf unless it is registered, so the walk is our own.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from sherd._torch import write_into
from sherd.errors import UnsupportedError

_CLOSED = frozenset((str, bytes, int, bool, float, complex, type(None), torch.dtype, torch.device))
"""The types that hold no tensor."""


def tensors_in(value: object, in_any_object: bool = False) -> list[torch.Tensor]:
    """Returns every tensor in `value`, in order; with `in_any_object` also those in objects that are no containers."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    def look_into(other: object) -> None:
        if type(other) not in _CLOSED:
            tensors.extend(tensors_held_by(other))

    map_tensors(note, value, look_into if in_any_object else None)
    return tensors


MOST_OBJECTS = 10_000
"""The most objects to look into for tensors."""


def tensors_held_by(*roots: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that `roots` hold, also in closures, iterators, attributes and arrays of objects.

    It does not look into modules, classes and the globals of functions.
    """
    seen: set[int] = set()
    waiting = list(roots)
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, FunctionType):
            waiting.extend((value.__closure__, value.__defaults__))
        elif type(value).__module__ == "numpy":  # the garbage collector does not know the items of an array
            waiting.extend(value.flat if getattr(value, "dtype", None) == "object" else ())
        elif not isinstance(value, (type, nn.Module, ModuleType)):
            within = gc.get_referents(value)[:MOST_OBJECTS]
            waiting.extend(() if _CLOSED.issuperset(map(type, within)) else within)


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor], value: Any, see: Callable[[object], None] | None = None
) -> Any:
    """Returns `value` with every tensor changed. Containers of changed tensors are rebuilt, all else is the same.

    `see`, if given, is called with each object that is neither a tensor nor a tuple, list, set or mapping.

    Raises:
        UnsupportedError: `value` contains itself.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    try:
        if isinstance(value, Mapping):
            return _map_mapping(change, value, see)
        if isinstance(value, (list, tuple, set, frozenset)):
            is_closed = _CLOSED.issuperset(map(type, value))
            new = value if is_closed else [map_tensors(change, each, see) for each in value]
            if all(map(is_, new, value)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        if see is not None:
            see(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _map_dataclass(change, value)
    except RecursionError:
        raise UnsupportedError(
            f"a {type(value).__name__} that a module takes or returns contains itself, or too many others in one "
            "another: a dataclass that knows its parent? Give the module parts that do not know the whole"
        ) from None
    return value


def _map_mapping(
    change: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any], see: Callable[[object], None] | None
) -> Any:
    new = {key: map_tensors(change, each, see) for key, each in value.items()}
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
    # The copy is written to: `__init__` may take other arguments than the fields, and frozen classes refuse setattr.
    rebuilt = copy.copy(value)
    for name, after in changed.items():
        write_into(rebuilt, name, after)
    return rebuilt
