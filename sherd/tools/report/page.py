"""The page of HTML that shows steps, drawn by plotly: one file, which loads no others. Decision 050: why plotly."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

from sherd.errors import InputError
from sherd.tools.report import folded
from sherd.tools.simulate.timeline import Advice, Candidate, Lane, LaneSpan, Timeline, TriedSettings
from sherd.units import BYTES, in_bytes, in_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WORK = {"forward": "#8c8c8c", "recompute": "#6b6b6b", "backward": "#4c4c4c", "optimizer": "#131313"}
WORK |= {"collectives": "#2f2f2f", "waits": folded.WAIT}
"""The colours of work: greys, which no kind of memory has."""
LIMIT = {"color": folded.WAIT, "dash": "dash"}
# The browser refuses to load anything, whatever the library would do.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
HEAD = f"""<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>"""
STYLE = "font-family: sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; overflow-wrap: break-word"


def require_plotly() -> None:
    """Raise InputError where plotly is missing."""
    if find_spec("plotly") is None:
        raise InputError("a page needs plotly: pip install plotly")


def page(timelines: Sequence[Timeline], search: TriedSettings | None = None, advice: Sequence[Advice] = ()) -> str:
    """Returns the page: facts, advice, memory and lanes over the step, what is alive at the peak, settings, units.

    Several timelines are one below the other, over the same time. Names are escaped, whatever they contain.

    Raises:
        InputError: plotly is missing.
    """
    require_plotly()
    titles = [_text(each.title) for each in timelines]
    parts = [f"<h1>{' and '.join(titles)}</h1>", _table(["a training step", *titles], _rows([*map(_facts, timelines)]))]
    if advice:
        rows = [[_text(each.change), in_bytes(each.saves_bytes), in_seconds(each.costs_seconds)] for each in advice]
        parts += ["<h2>What to change first</h2>", _table(["change", "saves at the peak", "costs per step"], rows)]
    kinds = [{kind: in_bytes(nbytes) for kind, nbytes in each.peak.by_kind.items()} for each in timelines]
    parts += ["<h2>The step</h2>", _drawn(_steps(timelines), "step", with_library=True)]
    parts += ["<h2>What is alive at the peak</h2>", _table(["kind", *titles], _rows(kinds))]
    if search is not None and search.candidates:
        parts += ["<h2>Settings</h2>", _drawn(_settings(search), "search")]
    parts += ["<h2>Units</h2>", *map(_units, timelines)]
    return f'{HEAD}{" and ".join(titles)}</title></head><body style="{STYLE}">{"".join(parts)}</body></html>\n'


def _text(words: object) -> str:
    """Returns `words` for HTML, and for plotly, which reads some tags: without lone surrogates, which no file holds."""
    return html.escape(str(words).encode("utf-8", "replace").decode(), quote=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of markup. The first column holds words, the others figures."""
    tags = ["<{} align=left>", *["<{} align=right>"] * (len(head) - 1)]
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ((tag.format(kind) + cell for tag, cell in zip(tags, line, strict=True)) for kind, line in lines)
    return f'<div style="overflow-x: auto"><table cellpadding=4><tr>{"<tr>".join(map("".join, cells))}</table></div>\n'


def _drawn(figure: Figure, name: str, with_library: bool = False) -> str:
    figure.update_layout(template="plotly_white", margin={"l": 110, "r": 10, "t": 60}, legend_orientation="h")
    return str(figure.to_html({"displaylogo": False}, include_plotlyjs=with_library, full_html=False, div_id=name))


def _rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Returns the rows of a table: a name, and what each column has under it."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[_text(name), *(_text(column.get(name, "")) for column in columns)] for name in names]


def _facts(timeline: Timeline) -> dict[str, str]:
    peak, wait, how = timeline.peak, folded.exposed_wait(timeline), "predicted" if timeline.is_predicted else "recorded"
    said = {"step": f"{in_seconds(timeline.seconds)}, {how}", "alive": f"{in_bytes(peak.nbytes)} {peak.moment}"}
    return {**said, "compute waits": f"{in_seconds(wait)} ({wait / timeline.seconds:.0%})", **timeline.facts}


def _units(timeline: Timeline) -> str:
    head, rows = [_text(timeline.title), "class", "parameters", "unsharded", "shard", "alive at the peak"], []
    for number, unit in enumerate(timeline.units):
        sizes = unit.unsharded_bytes, unit.shard_bytes, timeline.peak.by_unit.get(number, 0)
        rows.append([_text(unit.name or "(root)"), _text(unit.kind), f"{unit.numel:,}", *map(in_bytes, sizes)])
    return _table(head, [*rows, ["of no unit", "", "", "", "", in_bytes(timeline.peak.by_unit.get(-1, 0))]])


def _steps(timelines: Sequence[Timeline]) -> Figure:
    from plotly.subplots import make_subplots

    num, kinds = len(timelines), folded.kinds_of(timelines)
    lanes = [lane.value for lane in Lane if any(span.lane is lane for each in timelines for span in each.spans)]
    titles = [title for each in timelines for title in ("<br>".join(map(_text, folded.titles_of(each))), "")]
    rows = {"rows": 2 * num, "row_heights": [3, 2] * num, "vertical_spacing": 0.1 / num, "subplot_titles": titles}
    figure = make_subplots(**rows, shared_xaxes=True)
    top = 1.1 * max(folded.top_of(each, folded.levels(each, kinds)) for each in timelines) or 1.0
    for number, timeline in enumerate(timelines):
        _memory(figure, timeline, kinds, 1 + 2 * number, top)
        _lanes(figure, timeline, 2 + 2 * number, folded.SPANS // num)
        figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], row=2 + 2 * number, col=1)
    left_out = sum(max(0, len(each.spans) - folded.SPANS // num) for each in timelines)
    note = f"; {left_out:,} of the shortest spans are not drawn" if left_out else ""
    figure.update_xaxes(range=[0, 1e3 * max(each.seconds for each in timelines)])
    figure.update_xaxes(title=f"ms{note}", row=2 * num, col=1)
    return figure.update_layout(height=640 * num, barmode="overlay", bargap=0.2, hovermode="closest")


def _memory(figure: Figure, timeline: Timeline, kinds: Mapping[str, int], row: int, top: float) -> None:
    """Draw bytes over the step, by kind, with the peak and the lines."""
    drawn, peak, unit = folded.levels(timeline, kinds), timeline.peak, in_bytes(top).split()[1]
    scale, place = 1024 ** BYTES.index(unit), {"row": row, "col": 1}
    times = [1e3 * time for time in (*drawn.times, timeline.seconds)]
    for kind, column in drawn.of.items():
        once = {"name": _text(kind), "legendgroup": _text(kind), "showlegend": row == 1, "hoverinfo": "skip"}
        area = {"stackgroup": str(row), "line": {"shape": "hv", "width": 0}, "fillcolor": folded.COLORS[kinds[kind]]}
        figure.add_scatter(x=times, y=[nbytes / scale for nbytes in (*column, *column[-1:])], **once, **area, **place)
    for name, nbytes in timeline.lines.items():  # what is above the chart stands at its top
        line, side = (LIMIT, "right") if name == "limit" else ({"color": "black"}, "left")
        words = f"{_text(name)} {in_bytes(nbytes)}{' ↑' * (nbytes > top)}"
        label = {"annotation_text": words, "annotation_position": f"bottom {side}"}
        figure.add_hline(min(nbytes, top) / scale, line=line, **label, **place)
    dot, words = {"x": 1e3 * peak.time, "y": peak.nbytes / scale}, f"peak {in_bytes(peak.nbytes)}"
    figure.add_annotation(**dot, text=words, ax=50, ay=0, **place)
    # The pointer meets a bar that is not seen, as high as the chart, for each moment.
    wide = {"x": times[:-1], "width": [until - time for time, until in pairwise(times)], "offset": 0}
    said = _hover(_moment(time, drawn.at(number)) for number, time in enumerate(drawn.times))
    figure.add_bar(**wide, y=[top / scale] * len(drawn.times), opacity=0, showlegend=False, **said, **place)
    figure.update_yaxes(title=f"memory, {unit}", range=[0, top / scale], **place)


def _lanes(figure: Figure, timeline: Timeline, row: int, most: int) -> None:
    """Draw the `most` longest spans of each lane over the step."""
    work: dict[str, list[LaneSpan]] = {name: [] for name in WORK}
    for span in folded.longest(timeline.spans, most):
        work["waits" if folded.is_exposed(span) else span.name if span.name in WORK else "collectives"].append(span)
    for name, spans in work.items():
        once = {"name": name, "legendgroup": name, "showlegend": row == 2, "marker_color": WORK[name]}
        base, lasts = [1e3 * each.start for each in spans], [1e3 * (each.end - each.start) for each in spans]
        said = _hover(_said(timeline, each) for each in spans)
        lanes = [each.lane.value for each in spans]
        figure.add_bar(orientation="h", y=lanes, base=base, x=lasts, **said, **once, row=row, col=1)


def _hover(words: Iterable[str]) -> dict[str, object]:
    """Returns what shows `words` where the pointer is."""
    return {"customdata": [*words], "hovertemplate": "%{customdata}<extra></extra>"}


def _moment(time: float, sizes: Mapping[str, int]) -> str:
    parts = [
        (kind, in_bytes(sizes[kind])) for kind in sorted(sizes, key=sizes.__getitem__, reverse=True) if sizes[kind]
    ]
    return "<br>".join(_text(": ".join(part)) for part in [(in_seconds(time), in_bytes(sum(sizes.values()))), *parts])


def _said(timeline: Timeline, span: LaneSpan) -> str:
    unit = f" {timeline.units[span.unit].name or '(root)'}" if span.unit >= 0 else ""
    lasts = span.end - span.start
    sent = f", {in_bytes(span.nbytes)} sent, {in_bytes(span.nbytes / (lasts or 1))}/s" if span.nbytes else ""
    return _text(f"{span.lane.value}: {span.name}{unit}, {in_seconds(lasts)} from {in_seconds(span.start)}{sent}")


def _settings(search: TriedSettings) -> Figure:
    """Returns all settings by peak memory and step time, with a line through those that none beats in both."""
    from plotly.graph_objects import Figure

    ranked = sorted(search.candidates, key=lambda each: (each.peak_bytes, each.step_seconds))
    out, fits = ([each for each in ranked if each.fits == wanted] for wanted in (False, True))
    front = [each for at, each in enumerate(fits) if all(each.step_seconds < one.step_seconds for one in fits[:at])]
    best = [search.candidates[search.best]] if search.best >= 0 else []
    unit = in_bytes(ranked[-1].peak_bytes).split()[1]
    scale, figure = 1024 ** BYTES.index(unit), Figure()
    groups = {"does not fit": (out, folded.WAIT), "fits": (fits, WORK["forward"])}
    groups |= {"none is better in both": (front, folded.COLORS[0]), "best": (best, "black")}
    for name, (shown, color) in groups.items():
        x, y = [each.peak_bytes / scale for each in shown], [1e3 * each.step_seconds for each in shown]
        style = {"mode": "lines+markers" if shown is front else "markers", "line": {"shape": "hv", "color": color}}
        figure.add_scatter(x=x, y=y, name=name, **style, **_hover(map(_candidate, shown)))
    if search.limit_bytes:
        words = f"limit {in_bytes(search.limit_bytes)}"
        figure.add_vline(search.limit_bytes / scale, line=LIMIT, annotation_text=words)
    titles = {"title": f"{len(ranked):,} settings were tried, {len(fits):,} fit", "yaxis_title": "ms of a step"}
    return figure.update_layout(**titles, xaxis_title=f"peak memory, {unit}", hovermode="closest")


def _candidate(candidate: Candidate) -> str:
    sizes = f"{in_seconds(candidate.step_seconds)} a step, {in_bytes(candidate.peak_bytes)} at the peak"
    lines = [candidate.name, sizes, candidate.why, *(f"{name}: {word}" for name, word in candidate.settings.items())]
    return "<br>".join(_text(line) for line in lines if line)
