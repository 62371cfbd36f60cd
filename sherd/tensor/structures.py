"""Tensors inside the containers that modules take and return: tuples, lists, sets, dicts, namedtuples, dataclasses.

torch's pytree takes a dataclass for a leaf unless it is registered, so the walk is our own.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from sherd._torch import write_into
from sherd.errors import UnsupportedError

_CLOSED = frozenset((str, bytes, int, bool, float, complex, type(None), torch.dtype, torch.device))
"""The types that hold no tensor."""

Change = Callable[[torch.Tensor], torch.Tensor]
See = Callable[[object], None] | None

_PLAIN = _CLOSED | {list, tuple, dict, set, frozenset}

MOST_OBJECTS = 10_000
"""The most objects to look into for tensors."""


def tensors_in(value: object, in_any_object: bool = False) -> list[torch.Tensor]:
    """Returns every tensor in `value`, in order; with `in_any_object` also those in objects that are no containers."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    def look_into(other: object) -> None:
        if type(other) not in _CLOSED:
            tensors.extend(tensors_held_by(other))

    see = look_into if in_any_object else None
    try:
        _mapped(note, value, see)
    except RecursionError:
        tensors.clear()
        _mapped_in_cycles(note, value, see)
    return tensors


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
        elif not isinstance(value, (type, nn.Module, ModuleType)):
            if type(value).__module__ == "numpy":  # the garbage collector does not know the items of an array
                within = list(islice(value.flat, MOST_OBJECTS)) if getattr(value, "dtype", None) == "object" else []
            elif type(value) is dict:
                within = [*islice(value, MOST_OBJECTS), *islice(value.values(), MOST_OBJECTS)]
            elif type(value) in (list, tuple, set, frozenset, deque):  # not all of them, as the collector would give
                within = list(islice(value, MOST_OBJECTS))
            else:
                within = gc.get_referents(value)[:MOST_OBJECTS]
            waiting.extend(() if _is_closed(within) else within)


def _is_closed(values: Collection[object]) -> bool:
    """Returns True if `values` are known to hold no tensor without a walk in Python."""
    if len(values) < 64:
        return _CLOSED.issuperset(map(type, values))
    # The garbage collector follows many references at once. A number refers to nothing, a tensor to its class at least.
    for _ in range(8):
        within = gc.get_referents(*values)
        kinds = set(map(type, values if within else islice(values, MOST_OBJECTS)))
        if not within:
            return not [kind for kind in kinds if kind.__name__ == "ndarray"]  # it may be of objects
        if not kinds <= _PLAIN:
            return False
        values = within
    return False


def map_tensors(change: Change, value: Any) -> Any:
    """Returns `value` with every tensor changed. Containers of changed tensors are rebuilt, all else is the same.

    Raises:
        UnsupportedError: too many containers are in one another.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    try:
        return _mapped(change, value, None)
    except RecursionError:
        return _mapped_in_cycles(change, value, None)


def _mapped(change: Change, value: Any, see: See) -> Any:
    """Returns what `map_tensors` does. `see`, if given, is called with each object that is no tensor or container."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        is_closed = isinstance(value, dict) and _is_closed(value.values())
        return value if is_closed else _map_mapping(change, value, see)
    if isinstance(value, (list, tuple, set, frozenset)):
        if _is_closed(value):
            return value
        new = [_mapped(change, each, see) for each in value]
        if all(map(is_, new, value)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if see is not None:
        see(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(change, value)
    return value


def _mapped_in_cycles(change: Change, value: Any, see: See) -> Any:
    """Returns what `_mapped` does, for containers that contain themselves."""
    copies: dict[int, Any] = {}  # what a deep copy shall take for an object: its containers alone are copied
    seen: set[int] = set()
    waiting, is_changed = [value], False
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            copies[id(each)] = change(each)
            is_changed |= copies[id(each)] is not each
        elif isinstance(each, Mapping):
            waiting.extend(reversed([*each, *each.values()]))
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting.extend(reversed(list(each)))
        elif see is None and dataclasses.is_dataclass(each) and not isinstance(each, type):
            names = {**dict.fromkeys(field.name for field in dataclasses.fields(each)), **getattr(each, "__dict__", {})}
            waiting.extend(getattr(each, name, None) for name in reversed(names))
        else:
            copies[id(each)] = each
            if see is not None:
                see(each)
    try:
        return copy.deepcopy(value, copies) if is_changed else value
    except RecursionError:
        raise UnsupportedError(
            f"a {type(value).__name__} that a module takes or returns has too many containers in one another, as a "
            "long linked list; give the module parts of it"
        ) from None


def _map_mapping(change: Change, value: Mapping[Any, Any], see: See) -> Any:
    new = {key: _mapped(change, each, see) for key, each in value.items()}
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


def _map_dataclass(change: Change, value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = _mapped(change, before, None)
        if after is not before:
            changed[field.name] = after
    if not changed:
        return value
    # The copy is written to: `__init__` may take other arguments than the fields, and frozen classes refuse setattr.
    rebuilt = copy.copy(value)
    for name, after in changed.items():
        write_into(rebuilt, name, after)
    return rebuilt
