"""The page of HTML that shows steps: one file that loads no others. Tables are made here, charts by page.js."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files

from sherd.tools.report.folded import (
    OTHER,
    SPANS,
    Branch,
    Levels,
    branches,
    exposed_wait,
    kinds_of,
    levels,
    longest,
    top_of,
)
from sherd.tools.simulate.timeline import Advice, Candidate, Lane, Timeline, TriedSettings
from sherd.units import in_bytes, in_seconds

__all__ = ["page"]

TICKS = 1_000_000
"""Times in the data of the page are whole numbers: the step has so many ticks."""
COLUMNS = ("name_of", "starts", "ends", "units", "nbytes")
"""The columns of a lane's spans. Names are indices into `names`."""
KEYS = {"forward": "s0", "recompute": "s1", "backward": "s2", "collectives": "s3", "optimizer": "s4", "waits": "wait"}
"""The colours of page.css for the kinds of spans."""


def page(timelines: Sequence[Timeline], search: TriedSettings | None = None, advice: Sequence[Advice] = ()) -> str:
    """Returns the page: facts, advice, memory and lanes over the step, units, and the search.

    Several timelines are side by side, on the same scales. Names are escaped, whatever they contain.
    """
    kinds = kinds_of(timelines)
    data = json.dumps(_data(timelines, kinds, search), allow_nan=False, separators=(",", ":"))
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = " and ".join(timeline.title for timeline in timelines)
    steps = [
        _step(timeline, number, max(0, len(timeline.spans) - SPANS // len(timelines)))
        for number, timeline in enumerate(timelines)
    ]
    body = [
        _side_by_side(map(_headline, timelines)),
        _advice(advice),
        "<h2>The step</h2><p class=dim>Memory above, the queues of work below, over the same time. With the keyboard: "
        "arrow keys move, + and &minus; zoom, P goes to the peak.</p>",
        _side_by_side(steps),
        "<h2>What is alive at the peak</h2>",
        _side_by_side(_peak(timeline, kinds) for timeline in timelines),
        "<h2>Units</h2>",
        _side_by_side(map(_units, timelines)),
        _search(search),
    ]
    page = (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{_text(title)}</title>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'\">"
        f"<style>{style}</style></head><body><main>{''.join(body)}</main>"
        f"<script id=data type=application/json>{data.replace('<', chr(92) + 'u003c')}</script>"
        f"<script>{script}</script></body></html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # without lone surrogates


def _text(words: object) -> str:
    return html.escape(str(words))


def _side_by_side(parts: Iterable[str]) -> str:
    return f"<div class=steps>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of markup. The first column holds words, the others numbers."""
    tags = ["<{0}>", *["<{0} class=number>"] * (len(head) - 1)]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"{start.format(tag)}{cell}" for start, cell in zip(tags, cells, strict=True))

    return f"<table><thead>{row('th scope=col', head)}<tbody>{''.join(row('td', each) for each in rows)}</table>"


def _headline(timeline: Timeline) -> str:
    wait = exposed_wait(timeline)
    facts = {
        "step": in_seconds(timeline.seconds),
        **{name: said for name, said in timeline.facts.items() if name == "memory"},
        "alive at the peak": in_bytes(timeline.peak.nbytes),
        "waits of compute": f"{in_seconds(wait)} ({wait / timeline.seconds:.0%})",
        **timeline.facts,
    }
    shown = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    how = "Predicted before it runs" if timeline.is_predicted else "Recorded while it ran"
    return f"<h1>{_text(timeline.title)}</h1><p class=dim>One training step of one rank. {how}.</p><dl>{shown}</dl>"


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return ""
    rows = [[_text(item.change), in_bytes(item.saves_bytes), in_seconds(item.costs_seconds)] for item in advice]
    return f"<h2>What to change first</h2>{_table(['change', 'saves at the peak', 'costs per step'], rows)}"


def _step(timeline: Timeline, number: int, left_out: int) -> str:
    keys = "".join(
        f"<span><i class=key style='background:var(--{color})'></i>{name}</span>" for name, color in KEYS.items()
    )
    note = f"<p class=dim>{left_out:,} of the shortest spans are not drawn.</p>" if left_out else ""
    name = _text(timeline.title)
    return (
        f"<figure class=step data-step={number} role=group aria-label='{name}'><div class=tools>"
        f"<span class=keys>{keys}</span><button class=out aria-label='zoom out'>&minus;</button>"
        "<button class=in aria-label='zoom in'>+</button></div><div class=chart><div class=left></div>"
        "<div class=scroll></div></div><p class=readout aria-live=polite>"
        f"The peak is {in_bytes(timeline.peak.nbytes)}, {_text(timeline.peak.moment)}.</p>{note}</figure>"
    )


def _peak(timeline: Timeline, kinds: Mapping[str, int]) -> str:
    peak = timeline.peak
    color = {kind: f"<i class=key style='background:var(--k{number})'></i>" for kind, number in kinds.items()}
    other = color.get(OTHER, "<i class=key></i>")

    def rows(parts: Iterable[tuple[str, int]]) -> list[list[str]]:
        """Returns the largest parts, and one row for all others."""
        ranked = sorted(parts, key=lambda part: -part[1])
        if rest := ranked[8:]:
            ranked = [*ranked[:7], (f"{len(rest) + 1:,} others", ranked[7][1] + sum(nbytes for _, nbytes in rest))]
        return [[name, in_bytes(nbytes), f"{nbytes / (peak.nbytes or 1):.1%}"] for name, nbytes in ranked]

    every_kind = {**dict.fromkeys(kinds, 0), **peak.by_kind}  # the table is also the legend of the chart
    by_kind = [(color.get(kind, other) + _text(kind), nbytes) for kind, nbytes in every_kind.items()]
    names = {-1: "of no unit", **{number: unit.name or "(root)" for number, unit in enumerate(timeline.units)}}
    by_unit = [(_text(names[unit]), nbytes) for unit, nbytes in peak.by_unit.items() if nbytes]
    tables = [_table(["kind", "bytes", "share"], rows(by_kind)), _table(["unit", "bytes", "share"], rows(by_unit))]
    moment = f"{in_bytes(peak.nbytes)} at {in_seconds(peak.time)}, {_text(peak.moment)}."
    return f"<p>{moment}</p><div class=tables>{''.join(f'<div>{table}</div>' for table in tables)}</div>"


def _units(timeline: Timeline) -> str:
    head = "<span>unit</span><span class='number numel'>parameters</span><span class=number>unsharded</span>"
    shown = "".join(map(_branch, branches(timeline.units)))
    return f"<div class='unit dim'>{head}<span class=number>shard</span></div><ul class=units>{shown}</ul>"


def _branch(branch: Branch) -> str:
    unit = branch.unit
    alike = f" and {len(branch.alike):,} more" if branch.alike else ""
    cells = (
        f"<span><span class=name>{_text(unit.name or '(root)')}</span>{alike}"
        f"<span class=class>{_text(unit.kind)}</span></span>"
        f"<span class='number numel'>{unit.numel:,}</span><span class=number>{in_bytes(unit.unsharded_bytes)}</span>"
        f"<span class=number>{in_bytes(unit.shard_bytes)}</span>"
    )
    below = "".join(map(_branch, branch.below))
    more = f"<p class='more name'>and {_text(', '.join(branch.alike))}</p>" if branch.alike else ""
    if not below and not more:
        return f"<li><div class=unit>{cells}</div>"
    inner = f"{more}<ul>{below}</ul>" if below else more
    is_open = " open" if below and not unit.name else ""
    return f"<li><details{is_open}><summary class=unit>{cells}</summary>{inner}</details>"


def _front(search: TriedSettings) -> list[Candidate]:
    """Returns the Pareto front of the candidates that fit, by memory and time, the smallest first."""
    front: list[Candidate] = []
    fitting = (candidate for candidate in search.candidates if candidate.fits)
    for candidate in sorted(fitting, key=lambda candidate: (candidate.peak_bytes, candidate.step_seconds)):
        if not front or candidate.step_seconds < front[-1].step_seconds:
            front.append(candidate)
    return front


def _search(search: TriedSettings | None) -> str:
    if search is None or not search.candidates:
        return ""
    best = search.candidates[search.best] if search.best >= 0 else None

    rows = []
    for candidate in _front(search):
        name = candidate.name
        if best is not None and candidate is not best:
            name = ", ".join(word for key, word in candidate.settings.items() if best.settings.get(key) != word) or name
        cell = f"<span class=name>{_text(name)}</span>{' <b>best</b>' if candidate is best else ''}"
        rows.append([cell, in_seconds(candidate.step_seconds), in_bytes(candidate.peak_bytes)])
    num_fit, num_tight = (sum(each.fits and bool(each.why) >= only for each in search.candidates) for only in (0, 1))
    tight = f", {num_tight:,} of them tightly" if num_tight else ""
    said = f"{len(search.candidates):,} settings were tried; {num_fit:,} fit{tight}."
    return (
        f"<h2>Settings</h2><p>{said} Down and to the left is better: none beats those on the line in both.</p>"
        "<figure class=search style='margin:0'><div class=scatter></div><p class=readout aria-live=polite></p></figure>"
        f"{_table(['settings on the line; of others than the best, what differs', 'step', 'peak memory'], rows)}"
    )


def _data(steps: Sequence[Timeline], kinds: Mapping[str, int], search: TriedSettings | None) -> dict[str, object]:
    """Returns the data for page.js: whole numbers in columns, since there may be thousands of spans."""
    folded = [levels(step, kinds) for step in steps]
    most = max(max(memory.most, step.peak.nbytes) for memory, step in zip(folded, steps, strict=True))
    most = max(top_of(step.lines, most) for step in steps)
    unit = max(1, most // 20_000)
    seen = {span.lane for step in steps for span in step.spans}
    lanes = [lane for lane in Lane if lane in seen]
    pairs = zip(steps, folded, strict=True)
    shown = [_line(step, memory, lanes, unit, SPANS // len(steps)) for step, memory in pairs]
    seconds = max(step.seconds for step in steps)
    data = {"kinds": [*kinds], "colors": [*kinds.values()], "unit": unit, "most": most, "seconds": seconds}
    if search is None:
        return {**data, "steps": shown, "search": None}
    about = f"{len(search.candidates):,} settings by peak memory and step time. Arrow keys go on."
    front = _front(search)
    points = [{**asdict(candidate), "pareto": candidate in front} for candidate in search.candidates]
    found = {"best": search.best, "limit": search.limit_bytes, "about": about, "points": points}
    return {**data, "steps": shown, "search": found}


def _line(timeline: Timeline, folded: Levels, lanes: Sequence[Lane], unit: int, most: int) -> dict[str, object]:
    def tick(time: float) -> int:
        return round(time / timeline.seconds * TICKS)

    def column(lane: Lane) -> dict[str, object]:
        of_lane = sorted((span for span in spans if span.lane is lane), key=lambda span: span.start)
        rows = ((place[span.name], tick(span.start), tick(span.end), span.unit, span.nbytes) for span in of_lane)
        columns = list(zip(*rows, strict=True)) or [()] * 5
        return {"name": lane.value, **dict(zip(COLUMNS, columns, strict=True))}

    spans = longest(timeline.spans, most)
    place = {name: number for number, name in enumerate(dict.fromkeys(span.name for span in spans))}
    title, peak = timeline.title, timeline.peak
    return {
        "seconds": timeline.seconds,
        "units": [each.name or "(root)" for each in timeline.units],
        "times": [tick(time) for time in folded.times],
        "levels": [[nbytes // unit for nbytes in column] for column in folded.of.values()],
        "peak": {"at": tick(peak.time), "nbytes": peak.nbytes},
        "lines": timeline.lines,
        "about_memory": f"Memory over the step, {title}. The peak is {in_bytes(peak.nbytes)}, {peak.moment}.",
        "about_lanes": f"Lanes over the step, {title}. Compute waits {in_seconds(exposed_wait(timeline))} in all.",
        "names": list(place),
        "lanes": [column(lane) for lane in lanes],
    }
