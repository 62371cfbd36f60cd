"""How results read: rows with a value per system, ratios to its rival and aims; a Markdown table of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

OTHERS = (
    *("plain", "one vector", "DDP", "FSDP1", "FSDP1 flat", "FSDP2", "Megatron"),
    *("muon-fsdp2", "dion", "AdamW"),
)

# Each front end is held against the one of torch's that it replaces; the wrapper with the same `use_orig_params`.
RIVALS = {
    **dict.fromkeys(("sherd", "sherd coalesced", "sherd gloo", "Flat", "Flat gloo", "Flat view"), "FSDP2"),
    **dict.fromkeys(("Shard", "Blocks", "Owned"), "FSDP2"),
    "wrapper": "FSDP1",
    "wrapper flat": "FSDP1 flat",
}
TO_RIVALS = {
    "ratio to FSDP2": [name for name, rival in RIVALS.items() if rival == "FSDP2"],
    "ratio to FSDP1": [name for name, rival in RIVALS.items() if rival != "FSDP2"],
}
COLUMNS = (*OTHERS, *RIVALS)


@dataclass(frozen=True, slots=True)
class Aim:
    """What was set out to be reached: at most `limit`, of a ratio or of a value.

    `of` is "ratio", then it is the ratio of `system` to its rival; or it names the system whose own value is meant.
    """

    limit: float
    of: str = "ratio"
    system: str = "sherd"

    @property
    def whose(self) -> str:
        """The system that it is set for."""
        return self.system if self.of == "ratio" else self.of

    def reached(self, row: Row) -> float | None:
        """What there is to hold against the limit; None if it was not measured."""
        return row.ratios.get(self.system) if self.of == "ratio" else row.values.get(self.of)

    def verdict(self, row: Row) -> str:
        """Rounded to two digits behind the point, or as many as the limit has."""
        reached = self.reached(row)
        if reached is None:
            return f"<= {self.limit:g}: not measured"
        digits = max(2, len(f"{self.limit:g}".partition(".")[2]))
        return f"<= {self.limit:g}: {'met' if round(reached, digits) <= self.limit else 'missed'}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: a number per system, and for each of ours that over its rival's, with the middle half of rounds."""

    figure: str
    unit: str
    values: Mapping[str, float]
    ratios: Mapping[str, float] = field(default_factory=dict)
    shards_replicas: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    aim: Aim | Sequence[Aim] | None = None
    remark: str = ""

    @property
    def aims(self) -> Sequence[Aim]:
        """All there are, be it none, one or several."""
        if self.aim is None:
            return ()
        return (self.aim,) if isinstance(self.aim, Aim) else self.aim


@dataclass(frozen=True, slots=True)
class Figure:
    """What one measurement hands back: rows for the table, and every raw sample for the JSON."""

    rows: list[Row]
    samples: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sound: bool = True


Aims = Aim | Sequence[Aim] | None


def row_of_rounds(
    figure: str, unit: str, samples: Mapping[str, Sequence[float]], aim: Aims = None, remark: str = ""
) -> Row:
    """Medians per system. A ratio is taken round by round, so that what disturbs a round cancels."""
    values = {name: median(laps) for name, laps in samples.items()}
    by_round = {
        name: [ours / theirs for ours, theirs in zip(samples[name], samples[RIVALS[name]], strict=True)]
        for name in _with_rival(samples)
    }
    ratios = {name: median(each) for name, each in by_round.items()}
    return Row(figure, unit, values, ratios, spreads_of(by_round), aim, remark)


def row_of_differences(
    figure: str, unit: str, samples: Mapping[str, Sequence[float]], aim: Aims = None, remark: str = ""
) -> Row:
    """As `row_of_rounds`, of samples that can come near zero: a ratio is that of the medians."""
    values = {name: median(laps) for name, laps in samples.items()}
    by_round = {
        name: [ours / theirs for ours, theirs in zip(samples[name], samples[RIVALS[name]], strict=True) if theirs > 0]
        for name in _with_rival(samples)
    }
    return Row(figure, unit, values, ratios_of(values), spreads_of(by_round), aim, remark)


def row_of_counts(figure: str, unit: str, values: Mapping[str, float], aim: Aims = None, remark: str = "") -> Row:
    """For what is counted, not timed: one exact number per system."""
    return Row(figure, unit, values, ratios_of(values), {}, aim, remark)


def ratios_of(values: Mapping[str, float]) -> dict[str, float]:
    """Each of our systems over its rival; none where that is not positive."""
    return {name: values[name] / values[RIVALS[name]] for name in _with_rival(values) if values[RIVALS[name]] > 0}


def spreads_of(ratios: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """First and third quartile, where there are enough rounds for quartiles."""
    shards_replicas = {}
    for name, each in ratios.items():
        if len(each) >= 2:
            low, _, high = quantiles(each, n=4, method="inclusive")
            shards_replicas[name] = (low, high)
    return shards_replicas


def _with_rival(values: Mapping[str, Any]) -> list[str]:
    return [name for name, rival in RIVALS.items() if name in values and rival in values]


def three_digits(value: float) -> str:
    """1234.5 -> 1,234; 12.34 -> 12.3; 0.1234 -> 0.123."""
    magnitude = abs(value)
    return f"{value:,.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3}f}"


# The tables


def render(rows: Sequence[Row]) -> str:
    """The tables there is something for: values, ratios to FSDP2 and to FSDP1, aims."""
    ratios = [ratios_table(rows, title, names) for title, names in TO_RIVALS.items()]
    tables = [values_table(rows), *ratios, aims_table(rows)]
    return "\n\n".join(table for table in tables if table)


def values_table(rows: Sequence[Row]) -> str:
    """A column for each system that any row has a value of."""
    names = [name for name in COLUMNS if any(name in row.values for row in rows)]
    lines = [
        [
            row.figure,
            row.unit,
            *(three_digits(row.values[name]) if name in row.values else "" for name in names),
            row.remark,
        ]
        for row in rows
    ]
    return markdown(["figure", "unit", *names, "remark"], lines)


def ratios_table(rows: Sequence[Row], title: str, candidates: Sequence[str]) -> str:
    """Of rows in which one of these systems has a ratio; their rival is 1."""
    rows = [row for row in rows if any(name in row.ratios for name in candidates)]
    names = [name for name in candidates if any(name in row.ratios for row in rows)]
    return markdown([title, *names], [[row.figure, *(ratio_words(row, name) for name in names)] for row in rows])


def ratio_words(row: Row, name: str) -> str:
    """Returns a ratio with the middle half of the rounds; empty if there is none."""
    if name not in row.ratios:
        return ""
    ratio = f"{row.ratios[name]:.2f}"
    if name in row.shards_replicas:
        low, high = row.shards_replicas[name]
        ratio += f" ({low:.2f} to {high:.2f})"
    return ratio


def aims_table(rows: Sequence[Row]) -> str:
    """A line for each aim."""
    lines = []
    for row in rows:
        for aim in row.aims:
            reached = aim.reached(row)
            unit = f"of {RIVALS[aim.system]}" if aim.of == "ratio" else row.unit
            shown = "" if reached is None else three_digits(reached)
            lines.append([row.figure, aim.whose, shown, unit, aim.verdict(row)])
    return markdown(["figure", "system", "reached", "unit", "aim"], lines)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns padded so that it reads well in a terminal too; nothing, for no lines."""
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, rule, *lines)
    )
