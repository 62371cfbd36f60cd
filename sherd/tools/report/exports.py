"""A timeline for other programs: trace events for Perfetto and Chrome, or a picture for papers."""

from __future__ import annotations

from pathlib import Path

from sherd.errors import InputError
from sherd.tools.report.folded import COLORS, WAIT, exposed_wait, is_exposed, kinds_of, levels, titles_of, top_of
from sherd.tools.simulate.timeline import Lane, Timeline
from sherd.units import in_bytes, in_seconds

SUFFIXES = (".png", ".svg", ".pdf")
WORK = "#5b5b5b"
MICROSECONDS = 1e6


def perfetto(timeline: Timeline) -> dict[str, object]:
    """Returns the timeline as trace events, for ui.perfetto.dev: a thread for each lane, a counter for memory."""
    lanes = list(Lane)
    events: list[dict[str, object]] = [_named("process_name", 0, timeline.title)]
    for thread, lane in enumerate(lanes, start=1):
        events.append(_named("thread_name", thread, lane.value))
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for span in timeline.spans:
        unit = timeline.units[span.unit].name or "(root)" if span.unit >= 0 else ""
        name, thread = f"{span.name} {unit}".rstrip(), 1 + lanes.index(span.lane)
        begun, lasts = span.start * MICROSECONDS, (span.end - span.start) * MICROSECONDS
        event = {"ph": "X", "pid": 1, "tid": thread, "ts": begun, "dur": lasts, "name": name, "cat": span.name}
        events.append({**event, "args": {"unit": unit, "bytes": span.nbytes}})
    memory = levels(timeline, kinds_of([timeline]))
    for number, time in enumerate(memory.times):
        counter = {"ph": "C", "pid": 1, "ts": time * MICROSECONDS, "name": "memory"}
        events.append({**counter, "args": memory.at(number)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


def picture(timeline: Timeline, path: Path) -> None:
    """Draw memory and lanes over the step into `path`, a PNG, SVG or PDF by its suffix.

    Raises:
        InputError: `path` has another suffix.
        ImportError: matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: the name of a picture ends in one of {', '.join(SUFFIXES)}")
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # a $ in a name is a $
        _draw(timeline, path)


def _draw(timeline: Timeline, path: Path) -> None:
    from matplotlib.figure import Figure  # no pyplot: it keeps figures alive and may look for a screen

    figure = Figure(figsize=(8, 5), layout="constrained")
    memory, gantt = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    kinds = kinds_of([timeline])
    folded, colors = levels(timeline, kinds), [COLORS[number] for number in kinds.values()]
    times = [1e3 * time for time in (*folded.times, timeline.seconds)]
    stacks = [[nbytes / 2**30 for nbytes in (*column, *column[-1:])] for column in folded.of.values()]
    if folded.times:
        memory.stackplot(times, stacks, labels=list(folded.of), step="post", colors=colors, linewidth=0)
        memory.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), reverse=True, frameon=False)
    peak = timeline.peak
    memory.plot(1e3 * peak.time, peak.nbytes / 2**30, "o", color="black", markersize=4)
    top = 1.08 * top_of(timeline, folded) / 2**30 or 1.0
    memory.set_ylim(0, top)
    for name, nbytes in timeline.lines.items():  # what is above the chart stands at its top
        is_limit, at, over = name == "limit", min(nbytes / 2**30, top), " ↑" * (nbytes / 2**30 > top)
        style = {"color": WAIT, "linestyle": "--"} if is_limit else {"color": "black", "linestyle": "-"}
        memory.axhline(at, linewidth=1, **style)
        side, edge = ("right", "bottom") if is_limit and not over else ("right" if is_limit else "left", "top")
        place, words = (1 if is_limit else 0, at), f"{name} {in_bytes(nbytes)}{over}"
        memory.annotate(words, place, xycoords=memory.get_yaxis_transform(), ha=side, va=edge, fontsize=7)
    memory.set_title("\n".join(titles_of(timeline)), fontsize=9)
    memory.set(ylabel="memory, GiB")
    seen = {span.lane for span in timeline.spans}
    lanes = [lane for lane in Lane if lane in seen]
    for shade, exposed in ((WORK, False), (WAIT, True)):
        for row, lane in enumerate(lanes):
            spans = [span for span in timeline.spans if span.lane is lane and is_exposed(span) == exposed]
            bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans]
            gantt.broken_barh(bars, (row - 0.35, 0.7), facecolor=shade, edgecolor="white", linewidth=0.2)
    gantt.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    gantt.invert_yaxis()
    gantt.set(xlabel=f"ms; compute waits {in_seconds(exposed_wait(timeline))} for other lanes", xlim=(0, times[-1]))
    for axes in (memory, gantt):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
