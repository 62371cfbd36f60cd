r"""Values as JSON: the numbers, texts, lists and dicts of optimizers, schedulers and data loaders.

JSON has fewer types than Python. A value of any other type is an object with one key that begins with "$":

    ("a", 1)                {"$tuple": ["a", 1]}           float("inf")   {"$float": "inf"}
    {0: "x"}                {"$dict": [[0, "x"]]}          1 + 2j         {"$complex": [1.0, 2.0]}
    torch.tensor(3.0)       {"$scalar": ["F32", 3.0]}      b"\x00"        {"$bytes": "AA=="}
    torch.zeros(5)          {"$tensor": "loader/queue"}    torch.float16  {"$dtype": "F16"}

A tensor with dimensions is among the checkpoint's tensors, under the name given here. Nothing is pickled.
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
"""The errors of code that meets a value which sherd has not written."""


class Tensors(dict[str, torch.Tensor]):
    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Raises CheckpointError if the name is taken, or the elements are not in the tensor's memory."""
        require_bytes(tensor, name)
        if name in self:
            raise CheckpointError(
                f"two tensors would be called {name} in the checkpoint; rename an item, module or key"
            )
        self[name] = tensor


def encoded(value: object, path: str, keep: Callable[[str, torch.Tensor], None]) -> Json:
    """Returns `value` as JSON. Each tensor with dimensions goes to `keep`, with a name that begins with `path`.

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
    """Returns the value that was encoded as `value`. Tensors with dimensions come from `tensor`, by name.

    Raises:
        CheckpointError: there is no such encoding, or a tensor is in two places, and would take memory twice.
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
        ((type_name, content),) = value.items()
        return _DECODERS[type_name](content, tensor)
    except (CheckpointError, RecursionError):
        raise
    except NOT_WRITTEN as error:
        raise CheckpointError(f"{str(value)[:100]} is no encoding of a value ({error!r})") from None


def _number(value: object) -> object:
    if not isinstance(value, bool | int | float | complex):
        raise TypeError("a scalar holds one number")
    return value


_DECODERS: dict[str, Callable[[Json, Callable[[str], object]], object]] = {
    "$float": lambda content, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
    "$tuple": lambda content, tensor: tuple(_decoded(content, tensor)),
    "$dict": lambda content, tensor: {_decoded(key, tensor): _decoded(item, tensor) for key, item in content},
    "$scalar": lambda content, tensor: torch.tensor(_number(_decoded(content[1], tensor)), dtype=DTYPES[content[0]]),
    "$tensor": lambda content, tensor: tensor(content),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$complex": lambda content, tensor: complex(_decoded(content[0], tensor), _decoded(content[1], tensor)),
    "$dtype": lambda content, _: DTYPES[content],
}
