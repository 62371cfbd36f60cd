"""Kinds of values that users give for a field, in a program, a file or a command: a type, and limits in words."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
WANTED = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a string"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a field.

    Attributes:
        type: the type of the values. For a float, a whole number will do.
        limits: the limits in words, as "at least 1"; empty if there are none.
        holds: returns True for a value of the type that is within the limits.
        values: all values, if they are few.
        least: the least value, if there is one.
        others: other names of values, in small letters; "true" is also the name of True.
    """

    type: type
    limits: str = ""
    holds: Callable[[Any], bool] = lambda _: True
    values: tuple[str, ...] = ()
    least: float | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        """The limits in words, or else the type."""
        return self.limits or WANTED[self.type]

    def reason(self, value: object) -> str:
        """Returns why `value` cannot be used; empty if it can."""
        is_of_type = type(value) is self.type or (self.type is float and type(value) is int)
        if not is_of_type or (isinstance(value, float) and not math.isfinite(value)):
            return f"has the wrong type; it must be {WANTED[self.type].lower()}"
        return "" if self.holds(value) else f"is out of its limits; it must be {self.limits}"

    def usual(self, value: Any) -> Any:
        """Returns the value that a name stands for, and a whole number as a float where these are; else `value`."""
        if self.type is float and type(value) is int:
            return float(value)
        return self.others.get(str(value).lower(), value) if isinstance(value, bool | str) else value

    def of_word(self, word: str) -> Any:
        """Returns the value that `word` is, or `word` if it is none of the type, as `reason` then says."""
        if word in self.others:
            return self.others[word]
        try:
            if self.type is bool:
                return {"true": True, "false": False}[word]
            return _whole_number(word) if self.type is int else self.type(word)
        except (KeyError, ValueError, OverflowError):
            return word


def _whole_number(word: str) -> int:
    """Returns the whole number that `word` is, maybe in the form 1e6. Raises ValueError for any other word."""
    try:
        return int(word)
    except ValueError:
        number = float(word)
        if not number.is_integer():
            raise
        return int(number)


def at_least(low: float) -> Kind:
    """Returns the kind of the numbers of the type of `low` that are not below it."""
    return Kind(type(low), f"at least {low}", lambda value: bool(value >= low), least=low)


def above(low: float) -> Kind:
    return Kind(float, f"above {low:g}", lambda value: bool(value > low))


def one_of(*values: str) -> Kind:
    return Kind(str, f"one of {', '.join(values)}", lambda value: value in values, values)


def limited(default: T, about: str, kind: Kind | None = None, **more: object) -> T:
    """Returns a field of a record. Its metadata are what it is `about`, in words, its kind of values, and `more`."""
    value: T = field(default=default, metadata={"about": about, "kind": kind or Kind(type(default)), **more})
    return value


def parsed_toml(text: str) -> dict[str, Any]:
    """Returns the tree in a text in TOML. Raises ValueError if the text is not TOML, or nothing here reads TOML."""
    try:
        reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise ValueError("Python 3.10 reads TOML with tomli: pip install tomli") from error
    tree: dict[str, Any] = reader.loads(text)
    return tree
