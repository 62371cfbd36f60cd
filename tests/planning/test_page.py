"""The page says what the timeline holds, whatever its names are."""

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser

from sherd.tools.report import page
from sherd.tools.report.folded import COLORS, KINDS, SPANS, WAIT, kinds_of, levels
from sherd.tools.report.page import WORK
from sherd.tools.simulate.timeline import Candidate, Change, Lane, Peak, Timeline, TriedSettings
from sherd.units import in_bytes, in_seconds
from tests.planning.made_up import ADVICE, HOSTILE, search, timeline, units_of


class Reader(HTMLParser):
    """The words of a page, its tags, and what the charts are made of: `data` and `layout` of "step" and "search"."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._within = [], [], []
        self.data, self.layout = {}, {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within.append(tag)

    def handle_data(self, data):
        if self._within and self._within[-1] == "script":
            if drawn := re.search(r'Plotly\.newPlot\(\s*"(\w+)",\s*', data):
                read, at = json.JSONDecoder(), drawn.end()
                self.data[drawn[1]], at = read.raw_decode(data, at)
                self.layout[drawn[1]], _ = read.raw_decode(data, re.compile(r"[\s,]*").match(data, at).end())
        elif not (self._within and self._within[-1] == "style"):
            self.words.append(data)

    def handle_endtag(self, tag):
        while self._within and self._within.pop() != tag:
            pass

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def notes(self, chart="step"):
        """The titles and labels on a chart."""
        return [each["text"] for each in self.layout[chart]["annotations"]]

    def hovers(self, chart="step"):
        """What the pointer shows on a chart."""
        return [words for trace in self.data[chart] for words in trace.get("customdata", ())]


def test_the_page_says_the_facts_the_peak_the_units_the_advice_and_the_settings():
    shown = timeline()
    text = Reader(page([shown], search(), ADVICE)).text
    for words in (
        "llama-8b on 8 ranks",
        f"{in_seconds(shown.seconds)}, predicted",
        f"{in_bytes(shown.peak.nbytes)} {shown.peak.moment}",
        "tokens/s 12,300",
        "activations 4.92 GiB",
        "layers.11 Block 201,326,592 384 MiB 48.0 MiB 948 MiB",
        "reshard the last block after forward 384 MiB 3.10 ms",
    ):
        assert words in text, words
    alone = Reader(page([timeline(is_predicted=False)]))
    assert f"{in_seconds(shown.seconds)}, recorded" in alone.text
    assert "Settings" not in alone.text
    assert "What to change first" not in alone.text


def test_the_pointer_shows_moments_spans_and_settings_in_words():
    shown, tried = timeline(), search()
    made = Reader(page([shown], tried))
    best = tried.candidates[tried.best]
    moment = [words for words in made.hovers() if f": {in_bytes(shown.peak.nbytes)}<br>activations: 4.92 GiB" in words]
    assert len(moment) == 1
    assert "compute: forward (root), 400 µs from 3.10 ms" in made.hovers()
    assert any(words.startswith("all-gather: gather layers.0, 3.10 ms from") for words in made.hovers())
    assert any("336 MiB sent, 106 GiB/s" in words for words in made.hovers())
    assert made.layout["search"]["title"]["text"] == "48 settings were tried, 29 fit"
    chosen = {trace["name"]: trace["customdata"] for trace in made.data["search"]}
    said = f"{best.name}<br>{in_seconds(best.step_seconds)} a step, {in_bytes(best.peak_bytes)} at the peak<br>"
    assert [words.startswith(said) for words in chosen["best"]] == [True]
    assert chosen["best"][0] in chosen["none is better in both"]
    assert all("its peak is above the memory of the device" in words for words in chosen["does not fit"])


def test_titles_name_cluster_ranks_and_limit_and_lines_stand_at_what_is_reserved_and_at_the_limit():
    lines = {"reserved, with the driver": 9 << 30, "limit": 10 << 30}
    facts = {"cluster": "8 x H100, on 1 node", "memory": "9.00 GiB of 10.0 GiB: tight"}
    shown = dataclasses.replace(timeline(), lines=lines, facts=facts)
    made = Reader(page([shown], search()))
    title = "llama-8b on 8 ranks: 8 x H100, on 1 node, limit 10.0 GiB<br>8.29 GiB alive when backward reaches the root"
    assert f"{title}; 9.00 GiB of 10.0 GiB: tight" in made.notes()
    for words in ("reserved, with the driver 9.00 GiB", "limit 10.0 GiB", "peak 8.29 GiB"):
        assert words in made.notes(), words
    assert sorted(line["y0"] for line in made.layout["step"]["shapes"]) == [9.0, 10.0]
    assert made.notes("search") == [f"limit {in_bytes(search().limit_bytes)}"]
    far = Reader(page([dataclasses.replace(shown, lines={"limit": 10 << 40})]))
    assert "limit 10.0 TiB ↑" in far.notes()
    assert far.layout["step"]["yaxis"]["range"][1] < 10, "a limit far above leaves the chart as it is"


def test_a_kind_of_memory_has_the_same_colour_on_all_pages():
    def colors(*kinds):
        return kinds_of([of_changes(*((0.0, kind, 1) for kind in kinds))])

    assert colors("shards", "gradients", "activations") == {"shards": 0, "gradients": 2, "activations": 3}
    assert colors("a", "activations", "shards") == {"shards": 0, "activations": 3, "a": 1}
    assert {*colors(*map(str, range(KINDS + 3))).values()} == {*range(KINDS)}


def hostile():
    shown = timeline(3, title=HOSTILE, prefix=f"{HOSTILE}.")
    peak = dataclasses.replace(shown.peak, moment=HOSTILE, by_kind={HOSTILE: shown.peak.nbytes})
    changes = (Change(0.0, HOSTILE, -1, 1 << 30), *shown.changes)
    tried = search()
    first = Candidate(HOSTILE, {HOSTILE: HOSTILE}, 0.2, 1 << 20, True, HOSTILE)
    tried = dataclasses.replace(tried, candidates=(first, *tried.candidates), best=0)
    advice = [dataclasses.replace(ADVICE[0], change=HOSTILE)]
    lines = {HOSTILE: 1 << 30}
    return dataclasses.replace(shown, peak=peak, changes=changes, facts={HOSTILE: HOSTILE}, lines=lines), tried, advice


def test_no_name_becomes_markup():
    shown, tried, advice = hostile()
    written = page([shown], tried, advice)
    written.encode("utf-8")  # a lone surrogate would fail
    made = Reader(written)
    plain = Reader(page([timeline(3)], search(), ADVICE[:1]))
    assert {tag for tag, _ in made.tags} == {tag for tag, _ in plain.tags}
    assert {name for _, attrs in made.tags for name in attrs} == {name for _, attrs in plain.tags for name in attrs}
    names = [trace.get("name", "") for trace in made.data["step"]]
    for words in (*made.notes(), *made.hovers(), *made.hovers("search"), *names):
        assert {*re.findall("<[^>]*>", words)} <= {"<br>"}, words


def test_the_browser_may_load_nothing():
    policies = [attrs for tag, attrs in Reader(page([timeline()])).tags if tag == "meta" and "http-equiv" in attrs]
    allowed = dict(each.split(" ", 1) for each in policies[0]["content"].split("; "))
    assert allowed["default-src"] == "'none'"
    assert {*" ".join(allowed.values()).split()} == {"'none'", "'unsafe-inline'", "data:", "blob:"}


def test_thousands_of_spans_take_few_megabytes_and_the_shortest_of_too_many_are_left_out():
    shown = timeline(80, 4)
    assert len(shown.spans) > 2000
    library = len(page([timeline(1)]))
    assert len(page([shown], search(400))) < library + 1_500_000
    late = [
        dataclasses.replace(span, start=span.start + begin, end=span.end + begin)
        for begin in (shown.seconds * turn for turn in range(9))
        for span in shown.spans
    ]
    many = dataclasses.replace(shown, spans=tuple(late), seconds=9 * shown.seconds)
    assert len(late) > SPANS
    made = Reader(page([many, many]))
    assert sum(len(trace["y"]) for trace in made.data["step"] if trace.get("orientation") == "h") <= SPANS
    assert "of the shortest spans are not drawn" in made.layout["step"]["xaxis4"]["title"]["text"]


def test_two_timelines_share_their_scales_lanes_and_colours():
    made = Reader(page([timeline(), timeline(slow=2.0, title="run 17", is_predicted=False)]))
    layout = made.layout["step"]
    assert layout["xaxis"]["range"] == layout["xaxis3"]["range"] == [0, 1e3 * timeline(slow=2.0).seconds]
    assert layout["yaxis"]["range"] == layout["yaxis3"]["range"]
    used = [lane.value for lane in Lane if lane not in (Lane.MATRICES, Lane.BACK, Lane.HOST)]
    assert layout["yaxis2"]["categoryarray"] == layout["yaxis4"]["categoryarray"] == used[::-1]
    stacks = [
        (each["name"], each["fillcolor"], each["stackgroup"]) for each in made.data["step"] if "stackgroup" in each
    ]
    first, second = ([each[:2] for each in stacks if each[2] == row] for row in ("1", "3"))
    assert first == second
    assert len(first) == len(kinds_of([timeline()]))
    assert sum(each.get("showlegend", True) for each in made.data["step"]) == len(first) + len(WORK)


def bytes_at(shown, time):
    return sum(change.nbytes for change in shown.changes if change.time <= time)


def test_folding_keeps_the_peak_and_each_kept_moment_is_true():
    for shown in (timeline(1, 1), timeline(12, 1), timeline(80, 4)):
        found = levels(shown, kinds_of([shown]))
        assert found.most == shown.peak.nbytes
        assert found.times == sorted(found.times)
        assert found.times[0] == 0
        for number in range(0, len(found.times), 17):
            assert sum(column[number] for column in found.of.values()) == bytes_at(shown, found.times[number])


def of_changes(*changes, peak=1):
    changed = tuple(Change(time, kind, -1, nbytes) for time, kind, nbytes in changes)
    return Timeline("t", True, (), (), changed, Peak(peak, 0.0, "m", {}, {}), 1.0)


def test_drawn_memory_falls_at_once_and_kinds_are_as_many_as_there_are_colours():
    shown = of_changes((0.0, "shards", 5), (0.1, "a", 9), (0.1000001, "a", -9), (0.9, "a", 1), peak=14)
    found = levels(shown, kinds_of([shown]))
    assert list(zip(found.times, found.of["a"], strict=True)) == [(0.0, 0), (0.1, 9), (0.1000001, 0), (0.9, 1)]
    shown = of_changes(*((0.0, f"kind {number}", 100 + number) for number in range(KINDS + 3)))
    kinds = kinds_of([shown])
    assert len(kinds) == KINDS
    assert levels(shown, kinds).of["other"] == [sum(100 + number for number in range(4))]
    shown = of_changes((0.0, "a", 8), (0.1, "b", -4), (0.2, "a", -9), peak=8)
    assert levels(shown, kinds_of([shown])).of == {"a": [8, 8, 0]}, "one that only goes is not drawn"
    assert page([shown, timeline()])


def test_a_timeline_of_nothing_is_shown():
    for units in ((), units_of(0), units_of(2)):
        empty = Timeline("", False, units, (), (), Peak(0, 0.0, "", {}, {}), 1e-9)
        assert "Units" in Reader(page([empty], TriedSettings((), -1, None))).text


def test_sizes_have_three_digits():
    sizes = {0: "0 B", 1023: "1.00 KiB", -1536: "-1.50 KiB", 1 << 30: "1.00 GiB", 999.6 * 2**20: "0.98 GiB"}
    assert {size: in_bytes(size) for size in sizes} == sizes
    times = {0: "0.00 ms", 0.0125: "12.5 ms", 3.1e-6: "3.10 µs", 1234.5: "1,234 s"}
    assert {time: in_seconds(time) for time in times} == times


# Colours


def linear(color):
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one, other):
    """The ratio of WCAG 2."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(sum(w * c for w, c in zip(weights, linear(each), strict=True)) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


# What red-blind and green-blind eyes see (Machado, Oliveira and Fernandes, 2009).
EYES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red-blind": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "green-blind": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def lab(color, eyes):
    r, g, b = (min(max(sum(w * c for w, c in zip(row, linear(color), strict=True)), 0), 1) for row in EYES[eyes])
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (*xyz, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other, eyes):
    return sum((a - b) ** 2 for a, b in zip(lab(one, eyes), lab(other, eyes), strict=True)) ** 0.5


def test_colours_are_told_apart_by_colour_blind_readers_and_stand_out_from_paper():
    work = [color for name, color in WORK.items() if name != "waits"]
    assert min(contrast("#ffffff", color) for color in (*COLORS, *work, WAIT)) >= 3
    for eyes in EYES:
        assert min(difference(*pair, eyes) for pair in itertools.combinations(COLORS, 2)) > 15
        assert min(difference(*pair, eyes) for pair in itertools.pairwise(COLORS)) > 20
        assert min(difference(*pair, eyes) for pair in itertools.combinations(work, 2)) > 8
        # Kinds of work have no colour of a kind of memory. Two of these are grey to red-blind eyes.
        assert eyes != "all" or min(difference(*pair, eyes) for pair in itertools.product(work, COLORS)) > 15
