"""The page says what the timeline holds, whatever its names are."""

import dataclasses
import fnmatch
import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import sherd
from sherd.tools.report import page
from sherd.tools.report.folded import KINDS, SPANS, branches, kinds_of, levels
from sherd.tools.simulate.timeline import Candidate, Change, Lane, Peak, Timeline, TimelineUnit, TriedSettings
from sherd.units import in_bytes, in_seconds
from tests.planning.made_up import ADVICE, HOSTILE, search, timeline, units_of

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "sherd" / "tools" / "report"
CSS = (REPORT / "page.css").read_text()


class Reader(HTMLParser):
    """The words of a page, its tags, and the embedded data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._within = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within.append(tag)

    def handle_data(self, data):
        if self._within and self._within[-1] == "script" and data.startswith("{"):
            self.data = json.loads(data)
        elif not (self._within and self._within[-1] in ("script", "style")):
            self.words.append(data)

    def handle_endtag(self, tag):
        while self._within and self._within.pop() != tag:
            pass

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_the_page_says_the_facts_the_peak_the_units_the_advice_and_the_best_settings():
    shown, tried = timeline(), search()
    text = Reader(page([shown], tried, ADVICE)).text
    best = tried.candidates[tried.best]
    for words in (
        "llama-8b on 8 ranks",
        "Predicted before it runs",
        in_seconds(shown.seconds),
        in_bytes(shown.peak.nbytes),
        shown.peak.moment,
        "tokens/s 12,300",
        "layers.0 and 11 more",
        "reshard the last block after forward 384 MiB 3.10 ms",
        f"{best.name} best {in_seconds(best.step_seconds)} {in_bytes(best.peak_bytes)}",
        "48 settings were tried; 29 fit",
    ):
        assert words in text
    recorded = page([timeline(is_predicted=False)])
    alone = Reader(recorded)
    assert "Recorded while it ran" in alone.text
    assert "Settings" not in alone.text
    assert "What to change first" not in alone.text
    for color, kind in zip(alone.data["colors"], alone.data["kinds"], strict=True):  # though it takes none at the peak
        assert f"<i class=key style='background:var(--k{color})'></i>{kind}" in recorded
    assert "gradients 0 B 0.0%" in alone.text


def test_a_kind_of_memory_has_the_same_colour_on_all_pages():
    def colors(*kinds):
        return kinds_of([of_changes(*((0.0, kind, 1) for kind in kinds))])

    assert colors("shards", "gradients", "activations") == {"shards": 0, "gradients": 2, "activations": 3}
    assert colors("a", "activations", "shards") == {"shards": 0, "activations": 3, "a": 1}
    assert {*colors(*map(str, range(KINDS + 3))).values()} == {*range(KINDS)}


def test_of_settings_beside_the_best_it_is_told_what_differs():
    both = {"mesh": "8 ranks", "prefetch": "1 prefetched"}
    other = both | {"prefetch": "2 prefetched"}
    made = [
        Candidate(", ".join(each.values()), each, 3.0 - at, at + 1, True, "") for at, each in enumerate((other, both))
    ]
    text = Reader(page([timeline()], TriedSettings(tuple(made), 1, None))).text
    assert "what differs step peak memory 2 prefetched 3.00 s" in text
    assert "8 ranks, 1 prefetched best 2.00 s" in text


def test_the_page_has_the_answer_and_lines_for_what_is_taken_and_for_the_limit():
    lines = {"taken with the driver": 9 << 30, "limit": 10 << 30}
    shown = dataclasses.replace(timeline(), lines=lines, facts={"memory": "9.00 GiB of 10.0 GiB: tight"})
    tight = Candidate("tight", {"a": "b"}, 0.2, 9 << 30, True, "tight: published trainings took more")
    made = Reader(page([shown], dataclasses.replace(search(), candidates=(tight, *search().candidates))))
    assert "memory 9.00 GiB of 10.0 GiB: tight alive at the peak" in made.text
    assert "49 settings were tried; 30 fit, 1 of them tightly" in made.text
    assert made.data["steps"][0]["lines"] == lines
    assert made.data["most"] >= 10 << 30
    far = page([dataclasses.replace(shown, lines={"limit": 10 << 40})])
    assert Reader(far).data["most"] < 100 << 30, "a limit far above leaves the chart as it is"


def hostile():
    shown = timeline(3, title=HOSTILE, prefix=f"{HOSTILE}.")
    peak = dataclasses.replace(shown.peak, moment=HOSTILE, by_kind={HOSTILE: shown.peak.nbytes})
    changes = (Change(0.0, HOSTILE, -1, 1 << 30), *shown.changes)
    tried = search()
    first = Candidate(HOSTILE, {HOSTILE: HOSTILE}, 0.2, 1 << 20, True, HOSTILE)
    tried = dataclasses.replace(tried, candidates=(first, *tried.candidates), best=0)
    advice = [dataclasses.replace(ADVICE[0], change=HOSTILE)]
    return dataclasses.replace(shown, peak=peak, changes=changes, facts={HOSTILE: HOSTILE}), tried, advice


def test_no_name_becomes_markup():
    shown, tried, advice = hostile()
    written = page([shown], tried, advice)
    written.encode("utf-8")  # a lone surrogate would fail
    made = Reader(written)
    plain = Reader(page([timeline(3)], search(), ADVICE[:1]))
    assert not {"img"} & {tag for tag, _ in made.tags}
    assert {tag for tag, _ in made.tags} == {tag for tag, _ in plain.tags}
    assert {name for _, attrs in made.tags for name in attrs} == {name for _, attrs in plain.tags for name in attrs}
    assert made.data["search"]["points"][0]["why"] == HOSTILE
    assert HOSTILE in made.data["kinds"]


def test_the_page_asks_for_nothing_and_forbids_any_script_but_its_own():
    text = page([timeline()], search(), ADVICE)
    assert not re.findall(r"(?:src|href)\s*=|url\(\s*['\"]?(?!#wait)|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", text)


def test_thousands_of_spans_take_under_two_megabytes_and_the_shortest_of_too_many_are_left_out():
    shown = timeline(80, 4)
    assert len(shown.spans) > 2000
    assert len(page([shown], search(400)).encode()) < 400_000
    spans = [dataclasses.replace(span, start=span.start / 17, end=span.end / 17) for span in shown.spans]
    late = [
        dataclasses.replace(span, start=span.start + begin, end=span.end + begin)
        for begin in (shown.seconds * turn / 17 for turn in range(17))
        for span in spans
    ]
    many = dataclasses.replace(shown, spans=tuple(late))
    assert len(late) > SPANS
    made = page([many, many])
    assert len(made.encode()) < 2_000_000
    assert "of the shortest spans are not drawn" in made
    assert sum(len(lane["starts"]) for step in Reader(made).data["steps"] for lane in step["lanes"]) <= SPANS


def test_two_timelines_share_their_scales_and_colours_and_each_lane_has_its_name():
    made = Reader(page([timeline(), timeline(slow=2.0, title="run 17", is_predicted=False)]))
    first, second = made.data["steps"]
    assert made.data["seconds"] == second["seconds"] > first["seconds"]
    assert [lane["name"] for lane in first["lanes"]] == [lane["name"] for lane in second["lanes"]]
    assert len(first["levels"]) == len(second["levels"]) == len(made.data["kinds"])
    lanes = Reader(page([timeline()])).data["steps"][0]["lanes"]
    assert {lane["name"] for lane in lanes} == {lane.value for lane in Lane if lane is not Lane.MATRICES}
    assert html.escape("a<b") in page([timeline(title="a<b")])
    assert Path(sherd.__file__).is_relative_to(ROOT)


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


def unit(name, kind="Block", numel=1):
    return TimelineUnit(name, kind, numel, 4 * numel, numel)


def test_neighbours_that_are_alike_fold_with_all_that_is_below_them_and_others_do_not():
    names = ["layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.2", "layers.10", "layers.10.mlp"]
    (root,) = branches([unit(""), *map(unit, names), unit("head", "Linear")])
    found = {each.unit.name: each.alike for each in root.below}
    assert list(found.items()) == [("layers.0", ("layers.1",)), ("layers.2", ()), ("layers.10", ()), ("head", ())]
    assert [each.unit.name for each in root.below[0].below] == ["layers.0.mlp"]


def test_sizes_have_three_digits():
    sizes = {0: "0 B", 1023: "1.00 KiB", -1536: "-1.50 KiB", 1 << 30: "1.00 GiB", 999.6 * 2**20: "0.98 GiB"}
    assert {size: in_bytes(size) for size in sizes} == sizes
    times = {0: "0.00 ms", 0.0125: "12.5 ms", 3.1e-6: "3.10 µs", 1234.5: "1,234 s"}
    assert {time: in_seconds(time) for time in times} == times


# Colours


def tokens(block):
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))


THEMES = [tokens(block) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)]


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


def test_text_has_the_contrast_that_wcag_asks_for_and_colours_are_told_apart_by_colour_blind_readers():
    for theme in THEMES:
        pairs = [(theme["paper"], theme[name]) for name in ("ink", "dim", "wait", "focus")]
        pairs += [(theme["wash"], theme[name]) for name in ("ink", "dim")]
        # Labels on bars and bands are of the paper's colour.
        pairs += [(theme["paper"], theme[name]) for name in theme if name[0] in "ks" and name[1:].isdigit()]
        assert min(contrast(*pair) for pair in pairs) >= 4.5
    assert len(THEMES) == 2, "light and dark"
    for theme, eyes in itertools.product(THEMES, EYES):
        fills = [theme[f"k{number}"] for number in range(KINDS)]
        assert min(difference(*pair, eyes) for pair in itertools.combinations(fills, 2)) > 15
        assert min(difference(*pair, eyes) for pair in itertools.pairwise(fills)) > 20
        greys = [theme[f"s{number}"] for number in range(5)]
        assert min(difference(*pair, eyes) for pair in itertools.pairwise(greys)) > 8
        # Kinds of work have no colour of a kind of memory. Two of these are grey to red-blind eyes.
        assert eyes != "all" or min(difference(*pair, eyes) for pair in itertools.product(greys, fills)) > 15


def test_the_css_and_the_script_are_shipped():
    text = (ROOT / "pyproject.toml").read_text()
    patterns = re.findall(r'"([^"]+)"', re.search(r"^sherd = (\[.*\])$", text, re.MULTILINE)[1])
    for name in ("page.css", "page.js"):
        assert any(fnmatch.fnmatch(f"tools/report/{name}", pattern) for pattern in patterns)
