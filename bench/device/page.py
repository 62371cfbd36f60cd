"""What was measured on an accelerator: all figures in docs/understand/benchmarks.csv, the main ratios on its page.

    python -m bench.device.page figures.jsonl [more.jsonl ...] docs/understand/benchmarks.md

writes both from the lines of one run, or of several that measured parts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ..pages import as_csv
from ..table import COLUMNS, RIVALS, TO_RIVALS, Row, ratio_words, ratios_table, three_digits
from .cases import CASES
from .lines import read
from .rows import Result, rows_of

BEGIN, END = "<!-- figures of an accelerator: begin -->", "<!-- figures of an accelerator: end -->"

ON_THE_PAGE = ("step", "host", "allocated in backward", "allocated in forward and backward", "reserved")
"""The figures of which the page has the ratios."""

COUNTS = (
    ("step", "from the end of one step to the end of the next, by events of the device; steps follow one another"),
    ("host", "CPU time of the process until the last launch of a step returned, the device being idle before"),
    (
        "compute idle",
        "how long the busiest stream ran nothing in one step, by the profiler's trace: it waits for other streams, and "
        "for the host. On fake ranks the collectives are copies on the device: few waits are for them",
    ),
    ("collectives alone", "how long collectives ran in one step while no other kernel did, by the profiler's trace"),
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
    """Replaces what is between the two markers of `page`, and the data of the same name beside it.

    Raises:
        ValueError: the page has no such markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no line {BEGIN!r} with {END!r} behind it: nothing says where the figures go")
    page.write_text(f"{before}{BEGIN}\n\n{section(circumstances, results)}\n\n{END}{after}")
    page.with_suffix(".csv").write_text(as_csv(lines_of_data(results)))


def lines_of_data(results: Sequence[Result]) -> list[list[str]]:
    """Returns each figure of each group of ranks: the systems' values, and ratios to their rivals."""
    ratios = {name: f"{name} / {rival}" for name, rival in RIVALS.items()}
    lines = [["ranks", "figure", "unit", *COLUMNS, *ratios.values(), "remark"]]
    for row in rows_of(results):
        ranks, _, figure = row.figure.partition(", ")
        values = [three_digits(row.values[name]).replace(",", "") if name in row.values else "" for name in COLUMNS]
        lines.append([ranks, figure, row.unit, *values, *(ratio_words(row, name) for name in ratios), row.remark])
    return lines


def section(circumstances: Sequence[dict[str, Any]], results: Sequence[Result]) -> str:
    """Conditions, what the figures count, and the main ratios of each group."""
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
    """The ratios that the page shows, without the group's name in every row, and what failed."""
    short = [replace(row, figure=row.figure.partition(", ")[2]) for row in rows]
    shown = [row for row in short if row.figure.partition(": ")[2] in ON_THE_PAGE]
    failed = "\n".join(f"- {row.figure} failed: {row.remark}" for row in short if not row.values)
    tables = [ratios_table(shown, title, names) for title, names in TO_RIVALS.items()]
    return [part for part in (*tables, failed) if part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
