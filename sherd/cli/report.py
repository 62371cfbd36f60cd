"""The commands `sherd report` and `sherd compare`, for timelines that were kept as JSON. They load no torch."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sherd.cli.options import add_command, not_written, reader
from sherd.cli.terminal import say
from sherd.errors import InputError
from sherd.tools.plan.files import TIMELINE, from_json
from sherd.tools.report.exports import perfetto, picture
from sherd.tools.report.page import page
from sherd.tools.simulate.timeline import Timeline
from sherd.tools.simulate.values import Kind
from sherd.train.codes import BAD_INPUT, NO_ROOM
from sherd.units import in_bytes, in_seconds

REPORTS = "show a training step that was recorded or predicted: memory and work over time, as a page of HTML"
REPORT_CODES = f"exit code: 0, written; {BAD_INPUT}, it cannot be read, or not be drawn; {NO_ROOM}, not written"


def add_report(commands: Any) -> None:
    p = add_command(commands, "report", REPORTS, REPORT_CODES, do=report)
    p.add_argument("source", type=Path, metavar="RUN", help=f"a timeline's JSON, or a run's folder with {TIMELINE}")
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page; by default report.html next to the timeline, if no other file is asked for",
    )
    p.add_argument("--perfetto", type=Path, metavar="FILE", help="a trace for ui.perfetto.dev and Chrome")
    p.add_argument("--png", type=Path, metavar="FILE", help="a picture; by the end of its name PNG, SVG or PDF")


def timeline_in(source: Path) -> Timeline:
    """Returns the timeline in a file, or in a run's folder. Raises InputError."""
    source = source / TIMELINE if source.is_dir() else source
    try:
        return from_json(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None


def report(args: argparse.Namespace) -> int:
    """Write what is asked for; returns the exit code.

    Raises:
        InputError: the timeline cannot be read, or what is asked for cannot be drawn.
    """
    timeline = timeline_in(args.source)
    folder = args.source if args.source.is_dir() else args.source.parent
    out = args.out or (None if args.perfetto or args.png else folder / "report.html")
    try:
        if args.png:
            picture(timeline, args.png)
        if args.perfetto:
            args.perfetto.write_text(json.dumps(perfetto(timeline)), encoding="utf-8")
        if out:
            out.write_text(page([timeline]), encoding="utf-8")
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from None
    except OSError as error:
        return not_written("report", error)
    print("written ", *(each for each in (out, args.perfetto, args.png) if each))
    return 0


# sherd compare: two timelines of the same training, and where they differ

COMPARES = "compare a predicted step with a recorded one, or any two: seconds, memory, and where they part"
COMPARE_CODES = f"exit code: 0, compared; {BAD_INPUT}, a timeline cannot be read; {NO_ROOM}, the page was not written"
AS_RUN = "sherd plan RUN --timeline FILE plans the settings of the run in that folder, and chooses none"
SHARE = Kind(float, "a share from 0 to 1", lambda share: 0 <= share < 1)
TRIFLE = 0.001
"""Smaller differences are ignored: a share of the time of the step, or of the peak of memory."""

Figures = dict[str, tuple[float, float]]
"""Of both timelines, by name."""


def add_compare(commands: Any) -> None:
    p = add_command(commands, "compare", COMPARES, COMPARE_CODES, do=compare)
    for name, what in (("plan", "the first timeline's JSON"), ("trace", "the second one")):
        p.add_argument(name, type=Path, metavar=name.upper(), help=f"{what}, or a run's folder with {TIMELINE}")
    p.add_argument("--share", type=reader(SHARE), default=0.05, metavar="S", help="what differs by more is named: 0.05")
    p.add_argument("--out", type=Path, metavar="FILE", help="a page of HTML that shows both steps")
    p.add_argument("--json", action="store_true", help="the figures as JSON")


def compare(args: argparse.Namespace) -> int:
    """Print the table, and write the page if it is asked for; returns the exit code. Raises InputError."""
    plan, trace = timeline_in(args.plan), timeline_in(args.trace)
    found = compared(plan, trace, args.share)
    told = json.dumps(found, indent=2) if args.json else "\n".join(_lines(plan, trace, found))
    drawn = page([plan, trace]) if args.out else ""
    say(told)
    try:
        if args.out:
            args.out.write_text(drawn, encoding="utf-8")
    except OSError as error:
        return not_written("compare", error)
    return 0


def compared(plan: Timeline, trace: Timeline, share: float = 0.05) -> dict[str, Any]:
    """Returns the figures of both steps, and the first difference that is larger than `share` of the larger figure.

    Returns:
        `seconds` by lane and phase, `peak` and `most` (whenever that is) bytes by kind, each name with both figures;
        `parts`: in words, the first unit and kind in which bytes differ, and seconds.

    Raises:
        InputError: the timelines have units of other names.
    """
    for number, (one, other) in enumerate(zip(plan.units, trace.units, strict=False)):
        if one.name != other.name:
            raise InputError(f"unit {number} is {one.name!r} in one timeline and {other.name!r} in the other; {AS_RUN}")
    if len(plan.units) != len(trace.units):
        raise InputError(f"one timeline has {len(plan.units)} units and the other {len(trace.units)}; {AS_RUN}")
    steps = plan, trace
    seconds = {"step": (plan.seconds, trace.seconds), **_both(steps, _seconds)}
    peak = {"all": (float(plan.peak.nbytes), float(trace.peak.nbytes)), **_both(steps, lambda each: each.peak.by_kind)}
    names = ["(no unit)", *(unit.name or "(root)" for unit in plan.units)]
    parts = {
        "bytes": _parting(_both(steps, lambda each: _most(each, names)), share, TRIFLE * max(peak["all"]), in_bytes),
        "seconds": _parting(
            _both(steps, lambda each: _seconds(each, names)), share, TRIFLE * max(seconds["step"]), in_seconds
        ),
    }
    return {"seconds": seconds, "peak": peak, "most": _both(steps, _most), "parts": parts}


def _both(steps: tuple[Timeline, Timeline], figures: Callable[[Timeline], dict[str, Any]]) -> Figures:
    one, other = map(figures, steps)
    return {name: (one.get(name, 0), other.get(name, 0)) for name in dict.fromkeys([*one, *other])}


def _seconds(timeline: Timeline, names: list[str] | None = None) -> dict[str, float]:
    """Returns the seconds of spans by lane and name, before them the unit's if there are `names`."""
    sums: Counter[str] = Counter()
    for span in sorted(timeline.spans, key=lambda span: (span.unit < 0, span.unit)):
        where = f"{names[span.unit + 1]}: " if names else ""
        sums[f"{where}{span.lane.value}, {span.name}"] += span.end - span.start  # type: ignore[assignment]
    return dict(sums)


def _most(timeline: Timeline, names: list[str] | None = None) -> dict[str, int]:
    """Returns the most bytes of each kind at a time, of each unit by itself if there are `names`."""
    now: Counter[str] = Counter()
    most: dict[str, tuple[int, int]] = {}
    for change in timeline.changes:
        key = f"{names[change.unit + 1]}: {change.kind}" if names else change.kind
        now[key] += change.nbytes
        most[key] = change.unit, max(most.get(key, (0, 0))[1], now[key])
    return {key: nbytes for key, (_, nbytes) in sorted(most.items(), key=lambda each: (each[1][0] < 0, each[1][0]))}


def _parting(figures: Figures, share: float, trifle: float, in_words: Callable[[float], str]) -> str:
    for name, (one, other) in figures.items():
        if abs(one - other) > max(share * max(one, other), trifle):
            return f"{name}: {in_words(one)} and {in_words(other)}"
    return ""


def _lines(plan: Timeline, trace: Timeline, found: dict[str, Any]) -> Iterator[str]:
    kinds = ["predicted" if each.is_predicted else "recorded" for each in (plan, trace)]
    yield f"{plan.title} ({kinds[0]}) and {trace.title} ({kinds[1]})"
    for title, key, in_words in (
        ("seconds by lane", "seconds", in_seconds),
        ("bytes at the peak", "peak", in_bytes),
        ("most bytes of a kind", "most", in_bytes),
    ):
        yield f"\n{title:<34}{kinds[0]:>12}{kinds[1]:>12}{'ratio':>8}"
        for name, (one, other) in found[key].items():
            ratio = f"{other / one:.2f}" if one else ""
            yield f"  {name:<32}{in_words(one):>12}{in_words(other):>12}{ratio:>8}"
    yield f"\nThe peak is {plan.peak.moment}, and {trace.peak.moment}."
    for key, where in found["parts"].items():
        yield f"The first difference in {key} is {where}." if where else f"There is no large difference in {key}."
