"""What a module's forward returns its result in, and how its caller finds it there."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable
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
    return CONTAINERS[how][0](result) if how in CONTAINERS else result


def found_in(how: str, output: Any) -> Tensor:
    """The tensor that `packed` was given."""
    return CONTAINERS[how][1](output) if how in CONTAINERS else output


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


def _call(output: Any) -> Tensor:
    return output()


first, result = operator.itemgetter(0), operator.attrgetter("result")

CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda tensor: (tensor, 1), first),
    "list": (lambda tensor: [tensor], first),
    "dict": (lambda tensor: {"result": tensor}, operator.itemgetter("result")),
    "named": (lambda tensor: Named(tensor, "beside"), result),
    "dataclass": (Record, result),
    "nested": (lambda tensor: {"outer": ([Record(tensor)], None)}, lambda output: output["outer"][0][0].result),
    "object": (Holder, result),
    "extra_none": (lambda tensor: (None, tensor), operator.itemgetter(1)),
    "deque": (lambda tensor: deque([tensor]), first),
    "partial": (lambda tensor: functools.partial(torch.add, tensor, 0.0), _call),
    "closure": (lambda tensor: lambda: tensor, _call),
    "deep": (_deep, _found_deep),
    "values": (lambda tensor: {"result": tensor}.values(), lambda output: next(iter(output))),
    "iterator": (lambda tensor: iter([tensor]), next),
    "generator": (lambda tensor: (each for each in [tensor]), next),
    "ndarray": (_array, first),
    "distribution": (
        lambda tensor: torch.distributions.Normal(tensor, 1.0, validate_args=False),
        operator.attrgetter("loc"),
    ),
}
"""By name: how a result is put in, and how it is found."""
