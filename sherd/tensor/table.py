"""The tables of operations on sharded tensors, filled by the files that answer them; and walks over arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch.distributed.tensor import DTensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Changed = TypeVar("Changed")


class Aten(Protocol):
    """One overload of an operation of `torch.ops.aten`, as `__torch_dispatch__` gets it. torch's class is private."""

    @property
    def tags(self) -> Sequence[torch.Tag]:
        """The tags of the operation."""

    @property
    def is_view(self) -> bool:
        """True if the results are views of the first argument."""

    def name(self) -> str:
        """Returns the namespace, the operation and the overload: `aten::add.Tensor`."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the operation."""


Operation = Callable[[Aten, Args, Kwargs], object]
Answer = TypeVar("Answer", bound=Operation)

FILES = ("elementwise", "operands", "optimizers", "reductions")
"""The files of this folder that answer operations. They are loaded when the first operation is looked up."""


class Table:
    """The functions that answer operations on tensors of one class."""

    def __init__(self) -> None:
        self._by_name: dict[str, Operation] = {}
        self._by_overload: dict[Aten, Operation] = {}

    def answers(self, *names: str) -> Callable[[Answer], Answer]:
        """Let a function answer all overloads of these operations of `torch.ops.aten`.

        Four names stand for many operations: "pointwise" for those that torch tags so, "random" for those that draw
        numbers, "_foreach_" for those whose names begin so, "other" for the rest.
        """

        def enter(operation: Answer) -> Answer:
            for name in names:
                assert name not in self._by_name, f"two functions answer {name}"
                self._by_name[name] = operation
            return operation

        return enter

    def operation_for(self, func: Aten) -> Operation:
        operation = self._by_overload.get(func)
        if operation is None:
            for file in FILES:
                import_module(f"sherd.tensor.{file}")
            namespace, _, name = func.name().partition("::")
            name = name.partition(".")[0]
            if namespace != "aten" or name not in self._by_name:
                name = "_foreach_" if name.startswith("_foreach_") else ""
                draws = torch.Tag.nondeterministic_seeded in func.tags and "random" in self._by_name
                name = name or ("random" if draws else "pointwise" if torch.Tag.pointwise in func.tags else "other")
            operation = self._by_overload[func] = self._by_name[name]
        return operation


RAGGED = Table()
"""Answers operations on tensors that are cut into runs."""

SHARDED = Table()
"""Answers operations on tensors that are cut into equal chunks; torch answers the "other" ones."""

answers = RAGGED.answers


def is_in_place(func: Aten) -> bool:
    """Returns True if `func` writes to its first argument and returns that: `mul_`, but not `__and__`."""
    name = func.name().partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def name_of(func: Aten) -> str:
    """Returns the name by which users know an operation."""
    return func.name().replace("::", ".")


def tensors_among(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yields the tensors among an operation's arguments, and those in lists, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def of_kind(values: Iterable[object], kind: type[Changed]) -> Iterator[Changed]:
    """Yields the tensors of class `kind` among an operation's arguments, and those in lists, in order."""
    for tensor in tensors_among(values):
        if isinstance(tensor, kind):
            yield tensor


def first_list(args: Args) -> list[Any]:
    return list(next(value for value in args if isinstance(value, list | tuple)))


def is_index(value: object) -> TypeGuard[torch.Tensor]:
    """Returns True for a plain tensor that chooses elements, a mask or indices. It is the same on all ranks."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.ndim > 0 and not (value.is_floating_point() or value.is_complex())


def is_list_of_tensors(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple) and any(True for _ in tensors_among(value))


def with_changed(values: Any, kind: type[Changed], change: Callable[[Changed], object]) -> Any:
    """Returns arguments or results with every tensor of class `kind` changed, in lists, tuples and dicts too."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([with_changed(value, kind, change) for value in values])
    if isinstance(values, dict):
        return {key: with_changed(value, kind, change) for key, value in values.items()}
    return values
