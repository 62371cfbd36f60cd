"""Timelines and searches as JSON: `sherd-timeline/1` and `sherd-search/1`. Reading is strict, and loads no torch.

A record is an object of its fields, and a tuple of records is a table, as in

    {"format": "sherd-timeline/1", "spans": {"columns": ["lane", "name", ...], "rows": [["compute", "forward", ...]]}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from sherd.errors import InputError
from sherd.tools.simulate.timeline import Timeline, TriedSettings

__all__ = ["TIMELINE", "from_json", "search_from_json", "to_json"]

TIMELINE = "timeline.json"
"""The file of a recorded step, in the folder of its run."""
FORMATS = {Timeline: "sherd-timeline/1", TriedSettings: "sherd-search/1"}
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
T = TypeVar("T", Timeline, TriedSettings)


def to_json(record: Timeline | TriedSettings) -> str:
    """Returns `record` as JSON. Raises ValueError if a number in it is not finite."""
    plain = {"format": FORMATS[type(record)], **_plain(record)}
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Timeline:
    """Returns the timeline that `to_json` wrote.

    Raises:
        InputError: `text` is no timeline. The message is one line, and names the field.
    """
    timeline = _read_as(Timeline, text)
    units = range(-1, len(timeline.units))
    for number, span in enumerate(timeline.spans):
        _require(span.unit in units, f"spans[{number}].unit", f"there is no unit {span.unit}")
        _require(0 <= span.start <= span.end, f"spans[{number}].end", f"{span.end} comes before {span.start}, or 0")
    time = 0.0
    for number, change in enumerate(timeline.changes):
        _require(change.unit in units, f"changes[{number}].unit", f"there is no unit {change.unit}")
        _require(change.time >= time, f"changes[{number}].time", f"{change.time} comes before {time}")
        time = change.time
    for unit in timeline.peak.by_unit:
        _require(unit in units, "peak.by_unit", f"there is no unit {unit}")
    _require(timeline.seconds > 0, "seconds", f"expected more than 0, got {timeline.seconds}")
    return timeline


def search_from_json(text: str) -> TriedSettings:
    """Returns the search that `to_json` wrote. Raises InputError, as `from_json` does."""
    search = _read_as(TriedSettings, text)
    _require(search.best in range(-1, len(search.candidates)), "best", f"there is no candidate {search.best}")
    return search


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if type(value) is tuple:
        columns = [field.name for field in fields(value[0])] if value else []
        return {"columns": columns, "rows": [[_plain(getattr(record, name)) for name in columns] for record in value]}
    return value.value if isinstance(value, Enum) else value


def _read_as(record: type[T], text: str) -> T:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no JSON: {error}") from None
    _require(type(content) is dict, "the file", f"expected an object, found {_short(content)}")
    written = content.pop("format", None)
    _require(written == FORMATS[record], "format", f"expected {FORMATS[record]!r}, found {_short(written)}")
    if record is Timeline:
        content.setdefault("lines", {})  # files of 0.2 have none
    return cast(T, _read(record, content, ""))


def _read(hint: Any, value: Any, where: str) -> object:
    """Returns `value` as an object of the type `hint`. `where` names the field in messages."""
    if is_dataclass(hint):
        _require(type(value) is dict, where, f"expected an object, found {_short(value)}")
        hints = get_type_hints(hint)
        _require_names(list(value), list(hints), where)
        return cast(Any, hint)(
            **{name: _read(field, value[name], f"{where}.{name}".lstrip(".")) for name, field in hints.items()}
        )
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _read_table(inner[0], value, where)
    if origin is dict:
        _require(type(value) is dict, where, f"expected an object, found {_short(value)}")
        return {
            _read_key(inner[0], key, where): _read(inner[1], entry, f"{where}[{_short(key)}]")
            for key, entry in value.items()
        }
    if origin is UnionType:
        return None if value is None else _read(inner[0], value, where)
    if issubclass(hint, Enum):
        known = [member.value for member in hint]
        _require(value in known, where, f"expected one of {', '.join(known)}, found {_short(value)}")
        return hint(value)
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 63 else value
    _require(type(value) is hint, where, f"expected {WORDS[hint]}, found {_short(value)}")
    _require(hint is not float or math.isfinite(value), where, "expected a finite number")
    return cast(object, value)


def _read_table(record: Callable[..., object], table: Any, where: str) -> tuple[object, ...]:
    _require(type(table) is dict, where, f"expected an object of columns and rows, found {_short(table)}")
    _require_names(list(table), ["columns", "rows"], where)
    hints = get_type_hints(record)
    columns, rows = table["columns"], table["rows"]
    is_known = columns == list(hints) or not (columns or rows)
    _require(is_known, f"{where}.columns", f"expected {', '.join(hints)}, found {_short(columns)}")
    _require(type(rows) is list, f"{where}.rows", f"expected a list, found {_short(rows)}")
    records = []
    for number, row in enumerate(rows):
        place = f"{where}[{number}]"
        _require(type(row) is list and len(row) == len(columns), place, f"expected {len(columns)} values")
        named = {name: _read(hints[name], cell, f"{place}.{name}") for name, cell in zip(columns, row, strict=True)}
        records.append(record(**named))
    return tuple(records)


def _read_key(hint: type, key: str, where: str) -> object:
    if hint is str:
        return key
    _require(re.fullmatch(r"-1|0|[1-9]\d{0,9}", key) is not None, where, f"{_short(key)} is no index of a unit")
    return int(key)


def _require_names(names: list[str], expected: list[str], where: str) -> None:
    of = f" of {where}" if where else ""
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in expected]
    if missing or unknown:
        raise InputError(f"{missing[0]}{of}: missing" if missing else f"{_short(unknown[0])}{of}: unknown field")


def _require(holds: bool, where: str, otherwise: str) -> None:
    if not holds:
        raise InputError(f"{where}: {otherwise}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
