"""The checks of arguments that users give. No torch at run time, as in `policy`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from sherd.errors import PolicyError, PolicyTypeError

if TYPE_CHECKING:
    import torch

Number = TypeVar("Number", int, float)


def require_bool(where: str, value: object) -> None:
    """Raise `PolicyTypeError` if `value` is no bool. `where` names the argument, as "function(argument={})"."""
    if not isinstance(value, bool):
        raise PolicyTypeError(f"{where.format(repr(value))}: expected a bool")


def require_int(where: str, value: object, least: int) -> None:
    """Raise `PolicyTypeError` if `value` is no int, `PolicyError` if `value` is below `least`."""
    if not _is_number(value, int):
        raise PolicyTypeError(f"{where.format(repr(value))}: expected an int")
    if value < least:
        raise PolicyError(f"{where.format(value)}: expected {least} or more")


def require_factor(where: str, value: object) -> None:
    """Raise `PolicyTypeError` if `value` is no number, `PolicyError` for infinity and for numbers up to 0."""
    if not _is_number(value, float):
        raise PolicyTypeError(f"{where.format(repr(value))}: expected a number")
    if not 0 < value < math.inf:
        raise PolicyError(f"{where.format(repr(value))}: expected a finite number above 0")


def require_number(where: str, value: object, least: float, most: float) -> None:
    """Raise `PolicyTypeError` if `value` is no number, `PolicyError` outside `least` to `most`."""
    if not _is_number(value, float):
        raise PolicyTypeError(f"{where.format(repr(value))}: expected a number")
    if not least <= value <= most:
        raise PolicyError(f"{where.format(repr(value))}: expected a number from {least} to {most}")


def _is_number(value: object, kind: type[Number]) -> TypeGuard[Number]:
    """Returns whether `value` is an int, or a float if `kind` is float. A bool does not count."""
    return isinstance(value, kind | int) and not isinstance(value, bool)


def require_type(expectation: str, value: object, kind: Any) -> None:
    """Raise `PolicyTypeError` if `value` is no instance of `kind`, a class or a union of classes.

    `expectation` begins the error, as "function(argument=...): expected a Mesh".
    """
    if not isinstance(value, kind):
        raise PolicyTypeError(f"{expectation}, got a {type(value).__module__}.{type(value).__name__}")


def as_own(given: Any, kinds: Iterable[type]) -> Any:
    """Returns the object of `kinds` that says what `given` says, if that is of torch's class of the same name.

    Other objects are returned as they are.
    """
    for kind in kinds:
        if kind.__name__ == type(given).__name__ and type(given).__module__.startswith("torch.distributed.fsdp."):
            return kind[given.name] if issubclass(kind, Enum) else kind(**vars(given))
    return given


def require_floating_dtype(where: str, value: object) -> None:
    """Raise `PolicyTypeError` if `value` is neither None nor a dtype, `PolicyError` for an integer or bool dtype."""
    if value is None:
        return
    if not _is_dtype(value):
        dtype = _DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
        raise PolicyTypeError(
            f"{where.format(repr(value))}: expected a torch.dtype or None, got a {type(value).__name__}; write "
            f"torch.{dtype or 'bfloat16'}"
        )
    if not (value.is_floating_point or value.is_complex):
        raise PolicyError(
            f"{where.format(value)}: expected a floating-point dtype; parameters, gradients and outputs would be "
            "rounded to integers. Write torch.bfloat16, torch.float16 or torch.float32"
        )


def _is_dtype(value: object) -> TypeGuard[torch.dtype]:
    """Returns whether `value` is a `torch.dtype`, by the name of the class, as this file does not import torch."""
    return (type(value).__module__, type(value).__name__) == ("torch", "dtype")


_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "float32": "float32",
    "fp64": "float64",
    "double": "float64",
    "float64": "float64",
}
"""The dtypes that users name by strings."""
