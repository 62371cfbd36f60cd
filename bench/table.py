"""How results read: rows with a value per system, a ratio to FSDP2 and an aim; one Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

COLUMNS = ("plain", "DDP", "FSDP1", "FSDP2", "sherd")


@dataclass(frozen=True, slots=True)
class Aim:
    """What sherd set out to reach: at most `limit`, of the row's ratio or of sherd's own value."""

    limit: float
    of: str = "ratio"

    def verdict(self, row: Row) -> str:
        reached = row.ratio if self.of == "ratio" else row.values.get("sherd")
        if reached is None:
            return f"<= {self.limit:g}: not measured"
        return f"<= {self.limit:g}: {'met' if round(reached, 2) <= self.limit else 'missed'}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: a number per system, and sherd over FSDP2 with the middle half of its rounds."""

    figure: str
    unit: str
    values: Mapping[str, float]
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    aim: Aim | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one measurement hands back: rows for the table, and every raw sample for the JSON."""

    rows: list[Row]
    samples: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sound: bool = True


def row_of_rounds(
    figure: str, unit: str, samples: Mapping[str, Sequence[float]], aim: Aim | None = None, remark: str = ""
) -> Row:
    """Medians per system. The ratio is taken round by round, so that what disturbs a round cancels."""
    values = {name: median(laps) for name, laps in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(samples["sherd"], samples["FSDP2"], strict=True)]
    return Row(figure, unit, values, median(ratios), middle_half(ratios), aim, remark)


def row_of_counts(figure: str, unit: str, values: Mapping[str, float], aim: Aim | None = None, remark: str = "") -> Row:
    """For what is counted, not timed: one exact number per system."""
    return Row(figure, unit, values, quotient(values["sherd"], values["FSDP2"]), None, aim, remark)


def quotient(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs > 0 else None


def middle_half(ratios: Sequence[float]) -> tuple[float, float] | None:
    """First and third quartile; None where there are too few rounds for quartiles."""
    if len(ratios) < 2:
        return None
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return low, high


def three_digits(value: float) -> str:
    """1234.5 -> 1,234; 12.34 -> 12.3; 0.1234 -> 0.123."""
    magnitude = abs(value)
    return f"{value:,.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}"


def render(rows: Sequence[Row]) -> str:
    """One Markdown table, its columns padded so that it reads well in a terminal too."""
    header = ["figure", "unit", *COLUMNS, "sherd / FSDP2", "aim", "remark"]
    lines = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *lines[1:])
    )


def _cells(row: Row) -> list[str]:
    values = [three_digits(row.values[name]) if name in row.values else "" for name in COLUMNS]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    if row.spread is not None:
        ratio += f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})"
    verdict = "" if row.aim is None else row.aim.verdict(row)
    return [row.figure, row.unit, *values, ratio, verdict, row.remark]
