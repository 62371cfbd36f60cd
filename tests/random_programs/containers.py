"""What a module's forward returns its result in, and how its caller finds it there."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Named(NamedTuple):
    """A result and what stands beside it."""

    result: Tensor
    beside: Any


@dataclass
class Record:
    """A dataclass that torch's pytrees do not know."""

    result: Tensor
    beside: Any = None


class Holder:
    """An object of the user's own."""

    def __init__(self, result: Any) -> None:
        self.result = result


def packed(how: str, result: Tensor) -> Any:
    """`result` in a container."""
    return _PACK.get(how, lambda tensor: tensor)(result)


def found_in(how: str, output: Any) -> Tensor:
    """The tensor that `packed` was given."""
    return _FIND.get(how, lambda output: output)(output)


def _closure(tensor: Tensor) -> Any:
    return lambda: tensor


def _deep(tensor: Tensor) -> Any:
    holder: Any = tensor
    for _ in range(6):
        holder = Holder(holder)
    return holder


def _found_deep(output: Any) -> Tensor:
    while isinstance(output, Holder):
        output = output.result
    return output


def _array(tensor: Tensor) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = tensor
    return array


_PACK: dict[str, Any] = {
    "tuple": lambda tensor: (tensor, 1),
    "list": lambda tensor: [tensor],
    "dict": lambda tensor: {"result": tensor},
    "named": lambda tensor: Named(tensor, "beside"),
    "dataclass": Record,
    "nested": lambda tensor: {"outer": ([Record(tensor)], None)},
    "object": Holder,
    "extra_none": lambda tensor: (None, tensor),
    "deque": lambda tensor: deque([tensor]),
    "partial": lambda tensor: functools.partial(torch.add, tensor, 0.0),
    "closure": _closure,
    "deep": _deep,
    "values": lambda tensor: {"result": tensor}.values(),
    "iterator": lambda tensor: iter([tensor]),
    "generator": lambda tensor: (each for each in [tensor]),
    "ndarray": _array,
    "distribution": lambda tensor: torch.distributions.Normal(tensor, 1.0, validate_args=False),
}

_FIND: dict[str, Any] = {
    "tuple": lambda output: output[0],
    "list": lambda output: output[0],
    "dict": lambda output: output["result"],
    "named": lambda output: output.result,
    "dataclass": lambda output: output.result,
    "nested": lambda output: output["outer"][0][0].result,
    "object": lambda output: output.result,
    "extra_none": lambda output: output[1],
    "deque": lambda output: output[0],
    "partial": lambda output: output(),
    "closure": lambda output: output(),
    "deep": _found_deep,
    "values": lambda output: next(iter(output)),
    "iterator": next,
    "generator": next,
    "ndarray": lambda output: output[0],
    "distribution": lambda output: output.loc,
}
