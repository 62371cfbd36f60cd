"""Records of machines: what the simulated clock goes by. No figure of a record was measured by this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "records"
DTYPES = ("bfloat16", "float16", "float32", "tfloat32")
SHARES = ("attention", "reduction", "lookup", "copy")
LINKS = ("within", "across", "to_host")


def names() -> list[str]:
    """Returns the machines that the package knows."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """Returns the record of a machine as its file has it.

    Raises:
        ValueError: there is no such machine.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise ValueError(f"there is no machine {name!r}: one of {', '.join(names())}, or a record of your own")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record(machine: str | Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a machine by dotted name, in seconds, bytes and FLOP per second.

    Args:
        machine: a name of `names()`, or a record as those of `records/*.json`.

    Raises:
        ValueError: there is no such machine, or its record lacks a figure.
    """
    if isinstance(machine, str):
        machine = read(machine)
    figures = {name: machine.get(name) for name in ("launch", "host", "python", "bandwidth", "ranks_per_node")}
    for group, parts in (("flops", DTYPES), ("shares", SHARES), *((link, ("latency", "bandwidth")) for link in LINKS)):
        figures |= {f"{group}.{part}": machine.get(group, {}).get(part) for part in parts}
    missing = [name for name, figure in figures.items() if figure is None]
    if missing:
        raise ValueError(f"the machine's record has no {', '.join(missing)}")
    return {name: float(figure) for name, figure in figures.items()}
