"""The page works in a browser: in narrow and wide windows, under the pointer, without a network."""

import pytest

from sherd.tools.report import page
from sherd.tools.simulate.timeline import Candidate, Peak, Timeline, TriedSettings
from tests.planning.browser import browser, missing
from tests.planning.made_up import ADVICE, HOSTILE, search, timeline
from tests.planning.test_page import hostile

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NONE_FITS = TriedSettings((Candidate("one", {}, 0.5, 1 << 30, False, "too large"),), -1, None)
WIDTHS = (1280, 400)


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

    def show(name, width=1280):
        tab.open(pages[name], width)
        return tab

    return show


PLACE = """(() => {{ const e = document.querySelectorAll("#{chart} .nsewdrag")[{row}];
    e.scrollIntoView({{block: "center"}}); const r = e.getBoundingClientRect();
    return [r.left + r.width * {x}, r.top + r.height * {y}] }})()"""
TOLD = "[...document.querySelectorAll('#{chart} .hoverlayer .hovertext')].map((each) => each.textContent)"


def under_the_pointer(tab, chart, row, x, y):
    """What the chart tells of the place at these shares of its width and height."""
    left, top = tab.ask(PLACE.format(chart=chart, row=row, x=x, y=y))
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
    # The library waits between two looks. It draws in the frame after it has looked.
    for _ in range(100):
        if told := tab.ask(TOLD.format(chart=chart)):
            return told
        tab.ask("new Promise(requestAnimationFrame)")
    return []


@pytest.mark.parametrize("name", ["one", "two", "large", "hostile", "empty"])
def test_a_page_fits_its_window_and_asks_for_nothing(shown, pages, name):
    for width in WIDTHS:
        tab = shown(name, width)
        tab.screenshot(pages[name].parent / f"{name}-{width}.png")
        assert tab.ask("document.documentElement.scrollWidth") == width, width
        assert tab.count("#step .nsewdrag") == (4 if name == "two" else 2), width
        assert tab.count("#search .nsewdrag") == (name != "two"), width
        assert tab.requests == [pages[name].as_uri()], width
        assert tab.complaints == [], width


def test_the_pointer_shows_the_moment_and_the_span_under_it_of_each_step(shown):
    for name, rows in (("one", 1), ("two", 2)):
        tab = shown(name)
        for row in range(rows):
            (moment,) = under_the_pointer(tab, "step", 2 * row, 0.5, 0.5)
            assert "GiBactivations: " in moment, (name, row)
            (span,) = under_the_pointer(tab, "step", 2 * row + 1, 0.01, 0.08)
            assert span.startswith("compute: wait (root), 3.10 ms" if row == 0 else "compute: wait (root)"), (name, row)
    assert tab.complaints == []


def test_the_peak_is_named_also_on_a_phone(shown):
    for width in WIDTHS:
        assert "peak 8.29 GiB" in shown("one", width).ask("document.querySelector('#step').textContent")


def test_hostile_names_are_shown_and_run_nothing(shown):
    tab = shown("hostile")
    said = HOSTILE.replace("\ud800", "?").strip()
    assert tab.count("img") == 0
    assert said in tab.ask("document.querySelector('h1').textContent")
    assert said in tab.ask("document.querySelector('#step').textContent")
    (moment,) = under_the_pointer(tab, "step", 0, 0.5, 0.5)
    assert said in moment
    assert tab.complaints == []


def test_a_drag_zooms_into_both_charts(shown):
    tab = shown("two")
    (left, top), (right, _) = (tab.ask(PLACE.format(chart="step", row=1, x=x, y=0.5)) for x in (0.25, 0.75))
    for kind, x in (("mousePressed", left), ("mouseMoved", right), ("mouseReleased", right)):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=top, button="left", buttons=1, clickCount=1)
    ranges = tab.ask(
        "(() => { const l = document.querySelector('#step')._fullLayout;"
        " return [l.xaxis, l.xaxis2, l.xaxis3, l.xaxis4].map((each) => each.range) })()"
    )
    assert ranges[0][0] > 0
    assert ranges.count(ranges[0]) == 4
