"""Which function answers an operation on ragged tensors? Filled by the files that hold the functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tag

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Operation = Callable[[Any, Args, Kwargs], Any]

_named: dict[str, Operation] = {}
_found: dict[Any, Operation] = {}


def answers(*names: str) -> Callable[[Operation], Operation]:
    """Let a function answer all overloads of these operations of `torch.ops.aten`.

    Names that stand for many: "pointwise" (all that torch tags so), "_foreach_" (all that begin so), "other".
    """

    def enter(operation: Operation) -> Operation:
        for name in names:
            assert name not in _named, f"two functions answer {name}"
            _named[name] = operation
        return operation

    return enter


def operation_for(func: Any) -> Operation:
    """The function that answers `func`, looked up once."""
    operation = _found.get(func)
    if operation is None:
        operation = _found[func] = _look_up(func)
    return operation


def _look_up(func: Any) -> Operation:
    namespace, _, name = func.name().partition("::")
    name = name.partition(".")[0]
    if namespace == "aten" and name in _named:
        return _named[name]
    if name.startswith("_foreach_"):
        return _named["_foreach_"]
    return _named["pointwise" if Tag.pointwise in func.tags else "other"]
