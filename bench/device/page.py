"""The section of docs/understand/benchmarks.md that says what was measured on an accelerator.

    python -m bench.device.page figures.jsonl [more.jsonl ...] docs/understand/benchmarks.md

writes it from the lines of one run, or of several that measured parts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ..table import TO_RIVALS, Row, ratios_table, values_table
from .cases import CASES
from .lines import read
from .rows import Result, rows_of

BEGIN, END = "<!-- figures of an accelerator: begin -->", "<!-- figures of an accelerator: end -->"

COUNTS = (
    ("step", "from the end of one step to the end of the next, by events of the device; steps follow one another"),
    ("host", "CPU time of the process until the last launch of a step returned, the device being idle before"),
    (
        "compute idle",
        "how long the busiest stream ran nothing in one step, by the profiler's trace: it waits for other streams, and "
        "for the host. On fake ranks the collectives are copies on the device: few waits are for them",
    ),
    ("exposed communication", "how much longer a step takes than on a group whose collectives do nothing"),
    ("allocated", "most bytes of tensors alive at once in that phase; forward and backward are those of a micro-batch"),
    ("requested", "the same before the allocator rounded sizes up"),
    ("reserved", "most bytes that the allocator held from the device, from the first step on"),
)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 2 for arguments that are not understood."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *files, page = (Path(each) for each in arguments)
    write(page, *read(files))
    return 0


def write(page: Path, circumstances: Sequence[dict[str, Any]], results: Sequence[Result]) -> None:
    """Replace what is between the two markers of `page`.

    Raises:
        ValueError: the page has no such markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no line {BEGIN!r} with {END!r} behind it: nothing says where the figures go")
    page.write_text(f"{before}{BEGIN}\n\n{section(circumstances, results)}\n\n{END}{after}")


def section(circumstances: Sequence[dict[str, Any]], results: Sequence[Result]) -> str:
    """Conditions, what the figures count, and the tables of each group."""
    rows = rows_of(results)
    parts = ["\n".join(_conditions(each) for each in circumstances), _legend(rows), _cases(results)]
    for group, own in groupby(rows, key=lambda row: row.figure.partition(", ")[0]):
        parts += [f"**{group}**", *_tables(list(own))]
    return "\n\n".join(part for part in parts if part)


def _conditions(of: dict[str, Any]) -> str:
    libraries = [f"{name} {of[name]}" for name in ("driver", "cuda", "nccl") if of[name]]
    number = f"{of['num_devices']} x " if of["num_devices"] > 1 else ""
    return (
        f"Measured on {of['date']} on {number}{of['device']} with torch {', '.join([of['torch'], *libraries])}, "
        f"Python {of['python']}, {of['cores']} CPU cores, load {of['load']} before. Times are medians of {of['steps']} "
        "steps a turn, in brackets the middle half of the ratios; memory is of one step, of the rank that takes most."
    )


def _legend(rows: Sequence[Row]) -> str:
    shown = [f"- {name}: {what}." for name, what in COUNTS if any(f": {name}" in row.figure for row in rows)]
    return "\n".join(shown)


def _cases(results: Sequence[Result]) -> str:
    """What each case is, and on which stack it was measured."""
    stacks = dict.fromkeys((each.case, each.stack) for each in results)
    return "\n".join(f"- Case {name}: {CASES[name].what}. Llama blocks, {stack}." for name, stack in stacks)


def _tables(rows: Sequence[Row]) -> list[str]:
    """Values and ratios, without the group's name in every row."""
    short = [
        replace(row, figure=row.figure.partition(", ")[2], remark=row.remark if not row.values else "") for row in rows
    ]
    return [values_table(short), *(ratios_table(short, title, names) for title, names in TO_RIVALS.items())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
