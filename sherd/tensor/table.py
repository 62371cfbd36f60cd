"""The tables of operations on sharded tensors, filled by the files that answer them; and walks over arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeGuard, TypeVar

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Changed = TypeVar("Changed")


class Aten(Protocol):
    """One overload of an operation of `torch.ops.aten`, as `__torch_dispatch__` is given it. torch's own class is
    private."""

    @property
    def tags(self) -> Sequence[torch.Tag]: ...

    @property
    def is_view(self) -> bool: ...

    def name(self) -> str: ...

    def __call__(self, *args: object, **kwargs: object) -> Any: ...


Operation = Callable[[Aten, Args, Kwargs], object]
Answer = TypeVar("Answer", bound=Operation)


FILES = ("elementwise", "local_step", "operands", "optimizers", "pairs", "reductions")
"""The files of this folder that answer operations. They are loaded when the first operation is looked up."""


class Table:
    """The functions that answer operations on tensors of one class."""

    def __init__(self) -> None:
        self._named: dict[str, Operation] = {}
        self._found: dict[Aten, Operation] = {}

    def answers(self, *names: str) -> Callable[[Answer], Answer]:
        """Let a function answer all overloads of these operations of `torch.ops.aten`.

        Some names stand for many: "pointwise" (all that torch tags so), "_foreach_" (all that begin so), "other".
        """

        def enter(operation: Answer) -> Answer:
            for name in names:
                assert name not in self._named, f"two functions answer {name}"
                self._named[name] = operation
            return operation

        return enter

    def operation_for(self, func: Aten) -> Operation:
        """Returns the function that answers `func`, looked up once."""
        operation = self._found.get(func)
        if operation is None:
            for file in FILES:
                import_module(f"sherd.tensor.{file}")
            namespace, _, name = func.name().partition("::")
            name = name.partition(".")[0]
            if namespace != "aten" or name not in self._named:
                name = "_foreach_" if name.startswith("_foreach_") else ""
                name = name or ("pointwise" if torch.Tag.pointwise in func.tags else "other")
            operation = self._found[func] = self._named[name]
        return operation


RAGGED = Table()
"""Answers operations on tensors that are cut into runs."""

SHARDED = Table()
"""Answers operations on tensors that are cut into equal chunks; "other" are torch's."""

answers = RAGGED.answers


def is_in_place(func: Aten) -> bool:
    """Returns True if an operation writes to its first argument and returns it: `mul_`, but not `__and__`."""
    name = func.name().partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def name_of(func: Aten) -> str:
    """Returns the name by which users know an operation."""
    return func.name().replace("::", ".")


def tensors_among(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yields the tensors among an operation's arguments and in lists of them, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def first_list(args: Args) -> list[Any]:
    """Returns the first list of tensors, which the results of an operation on lists are like."""
    return list(next(value for value in args if isinstance(value, list | tuple)))


def is_list_of_tensors(value: object) -> TypeGuard[Sequence[Any]]:
    """Returns True for a list with a tensor in it."""
    return isinstance(value, list | tuple) and any(True for _ in tensors_among(value))


def with_changed(values: Any, kind: type[Changed], change: Callable[[Changed], object]) -> Any:
    """Returns the arguments or results with every tensor of `kind` changed, in lists, tuples and dicts too."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([with_changed(value, kind, change) for value in values])
    if isinstance(values, dict):
        return {key: with_changed(value, kind, change) for key, value in values.items()}
    return values
