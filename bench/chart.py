"""How does it compare, at a glance? `python -m bench.chart FIGURES.json ... CHART.svg`: ours as bars, FSDP2 as 1."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# What is drawn, and the rows it may come from: the first whose title has all of these words.
PANELS = {
    "step time": ("GPT", ": step"),
    "CPU time": ("GPT", "CPU time of a step"),
    "bytes copied": ("bytes copied,", "2 ranks"),
    "peak memory": ("GPT", "peak bytes of a step"),
}

SYSTEMS = {
    "sherd gloo": ("Shard(0), gloo", "#9ecae1"),
    "sherd": ("Shard(0), shared memory", "#3182bd"),
    "Flat gloo": ("Flat, gloo", "#fdae6b"),
    "Flat": ("Flat, shared memory", "#e6550d"),
}

WIDTH, LEFT, RIGHT, TOP = 760, 120, 60, 84
BAR, GAP = 16, 18
TEXT, FAINT, LINE = "#333333", "#777777", "#bbbbbb"
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 when there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.chart", description=__doc__)
    parser.add_argument(
        "figures",
        type=Path,
        nargs="+",
        help="what `python -m bench --json` has written; a later file adds figures that the earlier ones have not",
    )
    parser.add_argument("chart", type=Path, help="the SVG to write")
    chosen = parser.parse_args(arguments)
    panels: dict[str, dict[str, float]] = {}
    captions: dict[str, Path] = {}
    for file in chosen.figures:
        try:
            report = json.loads(file.read_text())
            if found := panels_of(report["rows"]):
                panels = found | panels
                captions.setdefault(caption(report["circumstances"]), file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{file}: not what `python -m bench --json` writes ({error!r}); run it first")
    if not panels:
        parser.error(f"{file}: none of the rows to draw; run `python -m bench --only steps peak bytes --json`")
    if len(captions) > 1:
        where = "; ".join(f"{file}: {each}" for each, file in captions.items())
        parser.error(f"measured under different circumstances ({where}); draw a chart of each")
    chosen.chart.write_text(svg({title: panels[title] for title in PANELS if title in panels}, *captions))
    return 0


def panels_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By panel, the ratio to FSDP2 of each system that there is one for."""
    panels = {}
    for title, words in PANELS.items():
        found = [row for row in rows if all(word in row["figure"] for word in words)]
        ratios = {name: found[0]["ratios"][name] for name in SYSTEMS if found and name in found[0]["ratios"]}
        if ratios:
            panels[title] = ratios
    return panels


def caption(circumstances: dict[str, Any]) -> str:
    """One line on where the figures come from."""
    return f"{circumstances['group']}, {circumstances['processor']}, torch {circumstances['torch']}"


def svg(panels: dict[str, dict[str, float]], below: str) -> str:
    """The chart: a group of bars per panel, a line where FSDP2 is."""
    longest = max(1.0, *(ratio for ratios in panels.values() for ratio in ratios.values()))
    scale = (WIDTH - LEFT - RIGHT) / longest
    bottom = TOP + sum(len(ratios) * BAR + GAP for ratios in panels.values())
    rival = LEFT + scale
    shapes = [
        f'<rect width="{WIDTH}" height="{bottom + 30}" fill="#ffffff"/>',
        *legend(),
        *bars(panels, scale),
        f'<line x1="{rival:.1f}" y1="{TOP - 6}" x2="{rival:.1f}" y2="{bottom - GAP + 6}" stroke="{TEXT}"/>',
        text(rival, TOP - 12, "FSDP2 = 1.00", "middle"),
        f'<line x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{bottom - GAP + 6}" stroke="{LINE}"/>',
        text(WIDTH / 2, bottom + 16, f"less is better; {below}", "middle", FAINT),
    ]
    size = f'width="{WIDTH}" height="{bottom + 30}" viewBox="0 0 {WIDTH} {bottom + 30}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>', *shapes, "</svg>", ""])


def legend() -> Iterator[str]:
    """The systems and their colours, two to a line: a font may be half as wide again as the one that is asked for."""
    for number, (label, colour) in enumerate(SYSTEMS.values()):
        x, y = LEFT + number % 2 * (WIDTH - LEFT) / 2, 12 + number // 2 * 20
        yield f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield text(x + 18, y + 11, label)


def bars(panels: dict[str, dict[str, float]], scale: float) -> Iterator[str]:
    """Each panel's bars below one another, its title on the left, each ratio behind its bar."""
    y = TOP
    for title, ratios in panels.items():
        yield text(LEFT - 10, y + len(ratios) * BAR / 2 + 5, title, "end")
        for name, ratio in ratios.items():
            width = ratio * scale
            yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{SYSTEMS[name][1]}"/>'
            yield text(LEFT + width + 5, y + BAR - 4, f"{ratio:.2f}", colour=FAINT)
            y += BAR
        y += GAP


def text(x: float, y: float, what: str, anchor: str = "start", colour: str = TEXT) -> str:
    """A line of text; `anchor` says which end of it is at `x`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(what)}</text>'


if __name__ == "__main__":
    sys.exit(main())
