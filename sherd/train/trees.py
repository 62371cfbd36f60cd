"""Where the values of a config come from: files, and words of a command line."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from sherd.extras import install
from sherd.train.config import SECTIONS, InputError, Tree

__all__ = ["assigned", "read_tree", "whole_number"]


def read_tree(path: str) -> Tree:
    """The tree in a TOML file, or in a JSON one when its name ends so.

    Raises:
        InputError: the file cannot be read, or does not parse.
    """
    if path.endswith((".yaml", ".yml")):
        raise InputError(f"the config {path} is YAML; give TOML, or JSON in a file that ends in .json")
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = json.loads(text) if path.endswith(".json") else _toml(text)
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except ValueError as error:  # the decoding errors of utf-8, JSON and TOML are all ValueErrors
        raise InputError(f"the config {path} does not parse: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        sections = ", ".join(f"[{section}]" for section in SECTIONS)
        raise InputError(f"the config {path} holds no sections; write them as {sections}")
    return tree


def _toml(text: str) -> Any:
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise InputError(f"Python 3.10 reads TOML with tomli: {install('train')}, or write JSON") from error
    return toml.loads(text)


def assigned(assignments: Iterable[str]) -> Tree:
    """The tree of `section.field=value` words; a value is read as the field's type wants it.

    Raises:
        InputError: a word of another form, or a value that does not read as the field's type.
    """
    tree: dict[str, dict[str, Any]] = {}
    for word in assignments:
        where, equals, text = word.partition("=")
        section, dot, name = where.partition(".")
        if not (equals and dot):
            homes = [each for each, fields in SECTIONS.items() if equals and where in get_type_hints(fields)]
            example = f"did you mean {homes[0]}.{word}?" if homes else "as in optimizer.lr=0.001"
            raise InputError(f"{word!r} is not an assignment; write section.field=value, {example}")
        kinds = get_type_hints(SECTIONS[section]) if section in SECTIONS else {}
        tree.setdefault(section, {})[name] = _literal(text, kinds.get(name, str))  # what is no field `Config.of` says
    return tree


def _literal(text: str, kind: type) -> Any:
    """`text` as `kind`; left a string where it is none, which `Config.of` then says."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        return whole_number(text) if kind is int else kind(text)
    except (KeyError, ValueError):
        return text


def whole_number(text: str) -> int:
    """`text`, a whole number, maybe in the form 1e6. Raises ValueError for any other."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is no whole number") from None
        return int(number)
