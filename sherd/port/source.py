"""Values as a user would write them in a call: `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard


class NoLiteralError(Exception):
    """The value cannot be written in a call: a lambda, a class made in a function, a process group."""


def written(value: Any) -> str:
    """Returns `value` as an expression, with the names that sherd, torch and the user's modules have.

    Raises:
        NoLiteralError: it has none.
    """
    if isinstance(value, str | torch.device):
        return json.dumps(str(value))
    if value is None or isinstance(value, bool | int | float | torch.dtype | Shard | Replicate):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return _collection(value)
    if isinstance(value, type) or inspect.isfunction(value):
        return _name(value)
    if isinstance(value, functools.partial):
        named = [f"{name}={written(argument)}" for name, argument in value.keywords.items()]
        return f"functools.partial({', '.join([*map(written, (value.func, *value.args)), *named])})"
    kind = type(value).__name__
    if kind in ("ModuleWrapPolicy", "CustomPolicy"):  # torch's or sherd's
        return f"{kind}({written(value._module_classes if kind == 'ModuleWrapPolicy' else value._lambda_fn)})"
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("sherd."):
        chosen = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr)
        return f"{kind}({', '.join(f'{field.name}={written(its)}' for field, its in chosen if its != field.default)})"
    raise NoLiteralError(value)


def _collection(values: Collection[Any]) -> str:
    parts = [written(value) for value in values]
    if isinstance(values, list):
        return f"[{', '.join(parts)}]"
    if isinstance(values, tuple):
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if len(set(parts)) < len(parts):
        raise NoLiteralError(values)  # two classes of one name
    return f"{{{', '.join(sorted(parts))}}}" if parts else "set()"


def _name(value: Any) -> str:
    """Returns the name of a class or a function."""
    name: str = value.__qualname__
    if "<" in name:  # `<lambda>`, or `<locals>` of a function
        raise NoLiteralError(value)
    if getattr(nn, name, None) is value:
        return f"nn.{name}"
    return name.lstrip("_") if value.__module__ == "torch.distributed.fsdp.wrap" else name
