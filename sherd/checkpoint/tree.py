"""Values that are no tensors, as JSON: the numbers, texts, lists and dicts of optimizers, schedulers and data loaders.

JSON has fewer types than Python. What it lacks is an object with one key that begins with "$":

    ("a", 1)                {"$tuple": ["a", 1]}           float("inf")   {"$float": "inf"}
    {0: "x"}                {"$dict": [[0, "x"]]}          1 + 2j         {"$complex": [1.0, 2.0]}
    torch.tensor(3.0)       {"$scalar": ["F32", 3.0]}      b"\\x00"        {"$bytes": "AA=="}
    torch.zeros(5)          {"$tensor": "loader/queue"}    torch.float16  {"$dtype": "F16"}

A tensor with dimensions is among the checkpoint's tensors, under the name that stands here. Nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sherd.checkpoint.tensor_bytes import DTYPES, dtype_name, require_bytes
from sherd.errors import CheckpointError

Json = Any
"""Any value that `json` reads and writes."""


NOT_WRITTEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""The errors that values lead to which sherd has not written."""


class Tensors(dict[str, torch.Tensor]):
    """Tensors by their names in a checkpoint."""

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Raises CheckpointError if there is one of this name, or its elements are not in its memory."""
        require_bytes(tensor, name)
        if name in self:
            raise CheckpointError(
                f"two tensors would be called {name} in the checkpoint; rename an item, module or key"
            )
        self[name] = tensor


def encoded(value: object, path: str, keep: Callable[[str, torch.Tensor], None]) -> Json:
    """Returns `value` as JSON. Each tensor with dimensions is handed to `keep` with its name, which begins with `path`.

    Raises:
        CheckpointError: an object is of another type, or contains itself. The message has its path.
    """
    try:
        return _encoded(value, path, keep)
    except RecursionError:
        raise CheckpointError(f"{path} contains itself, or too many lists and dicts in one another") from None


def _encoded(value: object, path: str, keep: Callable[[str, torch.Tensor], None]) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{path}/{key}", keep) for key, item in value.items()}
        pairs = [[_encoded(key, path, keep), _encoded(item, f"{path}/{key}", keep)] for key, item in value.items()]
        return {"$dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}/{at}", keep) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex() or isinstance(value, DTensor):
            keep(path, value)
            return {"$tensor": path}
        require_bytes(value, path)
        number = value.item()
        return {"$scalar": [dtype_name(value.dtype, path), _encoded(number, path, keep)]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [_encoded(value.real, path, keep), _encoded(value.imag, path, keep)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value, path)}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint holds tensors, numbers, "
        "texts, lists and dicts alone, so that reading it never runs code; turn it into these, or leave it out"
    )


def decoded(value: Json, tensor: Callable[[str], object]) -> Any:
    """Returns what was encoded as `value`; `tensor` of its name stands where a tensor with dimensions was.

    Raises:
        CheckpointError: there is no such encoding, or a tensor stands in two places, and would take memory twice.
    """
    seen: set[str] = set()

    def once(name: str) -> object:
        if name in seen:
            raise CheckpointError(f"a value has the tensor {name} in two places")
        seen.add(name)
        return tensor(name)

    try:
        return _decoded(value, once)
    except RecursionError:
        raise CheckpointError("a value has too many lists and dicts in one another") from None


def _decoded(value: Json, tensor: Callable[[str], object]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decoded(item, tensor) for key, item in value.items()}
    try:
        ((kind, held),) = value.items()
        return _DECODERS[kind](held, tensor)
    except (CheckpointError, RecursionError):
        raise
    except NOT_WRITTEN as error:
        raise CheckpointError(f"{str(value)[:100]} is no encoding of a value ({error!r})") from None


def _number(value: object) -> object:
    if not isinstance(value, bool | int | float | complex):
        raise TypeError("a scalar holds one number")
    return value


_DECODERS: dict[str, Callable[[Json, Callable[[str], object]], object]] = {
    "$float": lambda held, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held],
    "$tuple": lambda held, tensor: tuple(_decoded(held, tensor)),
    "$dict": lambda held, tensor: {_decoded(key, tensor): _decoded(item, tensor) for key, item in held},
    "$scalar": lambda held, tensor: torch.tensor(_number(_decoded(held[1], tensor)), dtype=DTYPES[held[0]]),
    "$tensor": lambda held, tensor: tensor(held),
    "$bytes": lambda held, _: base64.b64decode(held, validate=True),
    "$complex": lambda held, tensor: complex(_decoded(held[0], tensor), _decoded(held[1], tensor)),
    "$dtype": lambda held, _: DTYPES[held],
}
