"""Options of commands, made from the fields of records and kinds of values: all commands refuse a bad one alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Any

from sherd.tools.simulate.values import Kind
from sherd.train.codes import NO_ROOM

YES_OR_NO = {"yes": True, "no": False}
METAVARS = {int: "N", float: "yes|no|SHARE", bool: "yes|no", str: "NAME"}


def add_command(commands: Any, name: str, about: str, codes: str = "", **defaults: object) -> argparse.ArgumentParser:
    """Add a command to `commands`, the sub-parsers of `sherd`; `codes` are its exit codes in words."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, epilog=codes, allow_abbrev=False
    )
    parser.set_defaults(**defaults)
    return parser


def not_written(command: str, error: OSError) -> int:
    """Say which file could not be written; returns the exit code."""
    print(f"sherd {command}: {error.filename}: {error.strerror}", file=sys.stderr)
    return NO_ROOM


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def word_of(value: object) -> str:
    """Returns the word that stands for a value of a field."""
    words = {True: "yes", False: "no"} if isinstance(value, bool | float) else {}
    return words.get(value) or (f"{value:g}" if isinstance(value, float) else str(value))  # type: ignore[call-overload]


def reader(kind: Kind) -> Callable[[str], Any]:
    """Returns a function that reads a word of the command line as a value of `kind`."""

    def read(word: str) -> Any:
        value = kind.of_word(word)
        if reason := kind.reason(value):
            raise argparse.ArgumentTypeError(f"{value!r} {reason}")
        return value

    return read


def share_or_flag(kind: Kind) -> Callable[[str], Any]:
    """Returns a function that reads yes or no, for a share also a number, as a value of `kind`."""

    def read(word: str) -> Any:
        value = kind.type(YES_OR_NO[word]) if word in YES_OR_NO else kind.of_word(word)
        if kind.reason(value):
            either = "yes nor no" if kind.type is bool else f"yes, no, nor {kind.expected}"
            raise argparse.ArgumentTypeError(f"{word!r} is neither {either}")
        return value

    return read


def add_fields(parser: Any, fields: Iterable[Field[Any]]) -> None:
    """Add to a parser, or a group of it, an option for each field that `limited` has made; None unless it is given."""
    for each in fields:
        kind: Kind = each.metadata["kind"]
        read = share_or_flag(kind) if kind.type in (bool, float) else reader(kind)
        how = {"choices": kind.values} if kind.values else {"type": read, "metavar": METAVARS[kind.type]}
        parser.add_argument(flag_of(each.name), help=each.metadata["about"], **how)
