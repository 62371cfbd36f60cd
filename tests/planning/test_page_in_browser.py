"""The page works in a browser: in narrow and wide windows, in light and dark, by keyboard, without a network."""

import itertools

import pytest

from sherd.tools.report import page
from sherd.tools.simulate.timeline import Candidate, Peak, Timeline, TriedSettings
from tests.planning.browser import browser, missing
from tests.planning.made_up import ADVICE, HOSTILE, search, timeline
from tests.planning.test_page import hostile

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NONE_FITS = TriedSettings((Candidate("one", {}, 0.5, 1 << 30, False, "too large"),), -1, None)
WINDOWS = [(1280, False), (1280, True), (400, False), (400, True)]
STOPS = (
    """(() => { const e = document.activeElement; return e.dataset.chart || e.getAttribute("class") || e.tagName })()"""
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The files of pages, by name. The screenshots lie beside them."""
    texts = {
        "one": page([timeline()], search(), ADVICE),
        "two": page([timeline(), timeline(slow=1.4, title="run 17", is_predicted=False)]),
        "large": page([timeline(80, 4)], search(400)),
        "hostile": page([hostile()[0]], *hostile()[1:]),
        "empty": page([Timeline("", False, (), (), (), Peak(0, 0.0, "", {}, {}), 1.0)], NONE_FITS),
    }
    folder = tmp_path_factory.mktemp("pages")
    files = {name: folder / f"{name}.html" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text, encoding="utf-8")
    return files


@pytest.fixture
def shown(tab, pages):
    """`shown(name)`: the tab, with this page in it."""

    def show(name, width=1280, dark=False):
        tab.open(pages[name], width, dark)
        return tab

    return show


def stops(tab, most=60):
    """What Tab reaches, one after the other, until it starts again."""
    found = []
    for _ in range(most):
        tab.press("Tab")
        stop = tab.ask(STOPS)
        if stop == "BODY":
            break
        found.append(stop)
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["one", "two", "large", "hostile", "empty"])
@pytest.mark.parametrize(("width", "dark"), WINDOWS, ids=lambda value: str(value))
def test_a_page_fits_its_window_and_asks_for_nothing(shown, pages, name, width, dark):
    tab = shown(name, width, dark)
    tab.screenshot(pages[name].parent / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert tab.ask("document.documentElement.scrollWidth") == width
    assert tab.count("svg.plot") == (4 if name == "two" else 2)
    assert tab.requests == [pages[name].as_uri()]
    assert tab.complaints == []


def test_the_peak_is_in_sight_and_named(shown):
    in_sight = """(() => { const r = document.querySelector("circle.peak").getBoundingClientRect();
        const s = document.querySelector(".scroll").getBoundingClientRect();
        return r.width > 0 && r.left >= s.left - 6 && r.right <= s.right + 6 && r.top >= s.top })()"""
    for window in WINDOWS:
        tab = shown("one", *window)
        assert tab.ask(in_sight) is True, window
        assert "peak 8.29 GiB" in tab.ask("document.querySelector('svg.plot').textContent"), window


def test_tab_reaches_zoom_charts_units_and_the_search_and_each_stop_is_seen(shown):
    order = ["out", "in", "memory", "gantt", "unit", "unit", "point best"]
    assert [stop for stop in stops(shown("one")) if stop in order] == order
    assert [stop for stop in stops(shown("two")) if stop in ("memory", "gantt")] == ["memory", "gantt"] * 2
    tab = shown("one")
    for _ in order:
        tab.press("Tab")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert tab.ask("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2


def readout(tab, figure="figure.step"):
    return tab.ask(f"document.querySelector('{figure} .readout').textContent")


def test_arrow_keys_move_through_memory_and_p_goes_to_the_peak(shown):
    tab = shown("one")
    tab.focus("[data-chart=memory]")
    at_peak = readout(tab)
    assert ": 8.29 GiB: activations 4.92 GiB" in at_peak
    tab.press("ArrowRight")
    assert readout(tab) != at_peak
    tab.press("ArrowLeft")
    assert readout(tab) == at_peak
    tab.press("Home")
    assert readout(tab).startswith("0.00 s: ")
    tab.press("ArrowLeft")
    assert readout(tab).startswith("0.00 s: ")
    tab.press("p")
    assert readout(tab) == at_peak


def test_arrow_keys_move_through_spans_and_lanes(shown):
    tab = shown("one")
    tab.focus("[data-chart=gantt]")
    assert readout(tab).startswith("compute: wait (root)")
    tab.press("ArrowRight")
    assert readout(tab).startswith("compute: forward (root), 400 µs from 3.10 ms")
    tab.press("ArrowDown")
    assert readout(tab).startswith("all-gather: gather layers.0")
    assert "336 MiB sent" in readout(tab)
    tab.press("End")
    tab.press("ArrowDown")
    assert readout(tab).startswith("reduce-scatter: ")
    tab.press("ArrowDown", 9)
    assert readout(tab).startswith("host copies: copy")


def test_zoom_keeps_the_focus_and_what_is_picked_stays_in_sight_while_the_page_does_not_grow(shown):
    tab = shown("large", 400)
    tab.focus("[data-chart=gantt]")
    tab.press("+", 4)
    assert tab.ask(STOPS) == "gantt"
    assert tab.ask("document.documentElement.scrollWidth") == 400
    tab.press("End")
    inside = """(() => { const p = document.querySelector(".pick").getBoundingClientRect();
        const s = document.querySelector(".scroll").getBoundingClientRect();
        return p.left <= s.right && p.right >= s.left })()"""
    assert tab.ask(inside) is True
    assert readout(tab).startswith("compute: optimizer")
    tab.press("-", 9)
    scroll = "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    assert tab.ask(scroll) is True


def test_a_pointer_shows_the_span_under_it(shown):
    tab = shown("one")
    x, y = tab.ask(
        """(() => { const r = document.querySelector("[data-chart=gantt]").getBoundingClientRect();
        scrollTo(0, r.top - 100); const s = document.querySelector("[data-chart=gantt]").getBoundingClientRect();
        return [s.left + 5, s.top + 17] })()"""
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert readout(tab).startswith("compute: wait (root)")


def test_arrow_keys_go_from_candidate_to_candidate_and_units_open_by_keyboard(shown):
    tab = shown("one")
    tab.focus(".point.best")
    assert readout(tab, "figure.search").startswith("micro-batch 2, blocks of 3: 136 ms a step, 7.78 GiB at the peak.")
    tab.press("End")
    assert "Does not fit: its peak is above the memory of the device" in readout(tab, "figure.search")
    assert tab.ask("document.activeElement.getAttribute('aria-label')").endswith("does not fit")
    tab.press("ArrowRight")
    tab.press("Home")
    assert tab.count('.point[tabindex="0"]') == 1
    assert tab.count(".point") == 48
    tab.ask("document.querySelectorAll('summary')[1].focus()")
    tab.press("Enter")
    assert tab.ask("document.querySelectorAll('details')[1].open") is True
    assert "layers.11" in tab.ask("document.querySelectorAll('details')[1].innerText")


UNNAMED = """[...document.querySelectorAll("[tabindex], button, summary, svg, figure")].filter((e) =>
    !e.getAttribute("aria-label") && !e.textContent.trim() && e.getAttribute("aria-hidden") !== "true"
    && !e.querySelector("[aria-label]")).length"""
SMALL = """[...document.querySelectorAll("button, summary")].filter((e) => {
    const r = e.getBoundingClientRect(); return r.width && (r.width < 24 || r.height < 24) }).length"""
CUT = """[...document.querySelectorAll("svg text")].filter((e) => { const t = e.getBoundingClientRect(),
    s = e.ownerSVGElement.getBoundingClientRect();
    return t.left < s.left - 1 || t.right > s.right + 1 || t.top < s.top - 2 || t.bottom > s.bottom + 2 })
    .map((e) => e.textContent)"""


def test_everything_that_takes_the_focus_has_a_name_and_headings_go_down_one_by_one(shown):
    for name in ("one", "two", "hostile"):
        tab = shown(name)
        assert tab.ask(UNNAMED) == 0, name
        ids = tab.ask("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids)), name
        levels = tab.ask("[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => +e.tagName[1])")
        assert levels[0] == 1, name
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), name
        assert tab.ask("document.documentElement.lang && document.title && true") is True, name
        assert tab.ask(SMALL) == 0, name


def test_no_label_of_a_chart_is_cut_off_at_its_border(shown):
    for width in (1280, 400):
        assert shown("one", width).ask(CUT) == [], width


TOPS = """[...document.querySelectorAll('ul.units .unit')].filter((each) => each.checkVisibility()).map((each) =>
  [".name", ".number:last-child"].map((part) => {
    const range = document.createRange(); // without what stands before a name
    range.selectNodeContents(each.querySelector(part));
    return range.getClientRects()[0].top; }))"""
LONG = "document.querySelectorAll('ul.units .name').forEach((each) => { each.textContent = 'a'.repeat(60); })"


def test_units_names_stand_beside_their_figures_also_on_a_phone(shown):
    tab = shown("one", 390)
    tab.ask(LONG)
    tops = tab.ask(TOPS)
    assert tops
    assert all(abs(name - figure) < 8 for name, figure in tops)


def test_a_timeline_of_nothing_and_a_search_without_a_result_bear_all_keys(shown):
    tab = shown("empty")
    for chart in ("[data-chart=memory]", "[data-chart=gantt]", ".point"):
        tab.focus(chart)
        for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "p", "+", "-"):
            tab.press(key)
    assert "Does not fit: too large." in readout(tab, "figure.search")
    assert tab.complaints == []


def test_hostile_names_are_shown_and_run_nothing(shown):
    tab = shown("hostile")
    assert tab.count("img") == 0
    assert HOSTILE.replace("\ud800", "?").strip() in tab.ask("document.querySelector('h1').textContent")
    tab.focus("[data-chart=gantt]")
    tab.press("ArrowRight", 3)
    assert "</script>" in readout(tab)
    assert tab.complaints == []


def test_a_page_prints_without_its_controls_and_in_the_colours_of_paper(shown):
    tab = shown("one", dark=True)
    tab.ask("dispatchEvent(new Event('beforeprint'))")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.ask("getComputedStyle(document.querySelector('button')).display") == "none"
    assert tab.ask("document.querySelector('svg.plot').getBoundingClientRect().right") <= 1280 / 2 + 340
    assert tab.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"]
    tab.call("Emulation.setEmulatedMedia", media="")
