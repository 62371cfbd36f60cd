"""Which tensors are among an operation's arguments or results, and how is each exchanged for another?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors among the values and in lists of them, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def changed(values: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The arguments or results with each tensor of `kind` changed, in lists, tuples and dicts too."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)([changed(each, kind, change) for each in values])
    if isinstance(values, dict):
        return {key: changed(each, kind, change) for key, each in values.items()}
    return values
