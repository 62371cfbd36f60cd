"""A timeline comes back from JSON as it was, and a bad file is refused by the name of its field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.tools.plan.files import from_json, search_from_json, to_json
from sherd.tools.simulate.timeline import Candidate, Change, Lane, LaneSpan, Peak, Timeline, TimelineUnit, TriedSettings
from sherd.train.config import InputError
from tests.planning.made_up import search, timeline
from tests.support.refusals import NOTHING, one_line

texts = st.text(max_size=8)
times = st.floats(0, 1e6)
sizes = st.integers(0, 1 << 60)


@st.composite
def timelines(draw):
    units = draw(st.lists(st.builds(TimelineUnit, texts, texts, sizes, sizes, sizes), max_size=4))
    indices = st.integers(-1, len(units) - 1)
    spans = []
    for _ in range(draw(st.integers(0, 6))):
        start, end = sorted((draw(times), draw(times)))
        spans.append(LaneSpan(draw(st.sampled_from(Lane)), draw(texts), draw(indices), start, end, draw(sizes)))
    changes = draw(st.lists(st.builds(Change, times, texts, indices, st.integers()), max_size=6))
    changes.sort(key=lambda change: change.time)
    by_kind, by_unit = (draw(st.dictionaries(keys, sizes, max_size=3)) for keys in (texts, indices))
    peak = Peak(draw(sizes), draw(times), draw(texts), by_kind, by_unit)
    seconds = draw(st.floats(1e-9, 1e6))
    facts = draw(st.dictionaries(texts, texts, max_size=3))
    return Timeline(draw(texts), draw(st.booleans()), tuple(units), tuple(spans), tuple(changes), peak, seconds, facts)


@given(timelines())
def test_a_timeline_comes_back_as_it_was(made):
    assert from_json(to_json(made)) == made


candidates = st.builds(Candidate, texts, st.dictionaries(texts, texts), times, sizes, st.booleans(), texts)


@given(st.lists(candidates, max_size=4), st.none() | sizes)
def test_a_search_comes_back_as_it_was(tried, limit):
    made = TriedSettings(tuple(tried), len(tried) - 1, limit)
    assert search_from_json(to_json(made)) == made


def test_the_file_names_its_format_and_has_a_table_of_each_kind_of_record():
    written = json.loads(to_json(timeline()))
    assert written["format"] == "sherd-timeline/1"
    assert written["spans"]["columns"] == ["lane", "name", "unit", "start", "end", "nbytes"]
    assert json.loads(to_json(search()))["format"] == "sherd-search/1"


def test_a_search_that_never_ends_or_has_no_best_candidate_is_refused():
    with pytest.raises(ValueError):
        to_json(TriedSettings((Candidate("a", {}, float("inf"), 1, False, "never ends"),), -1, None))
    plain = json.loads(to_json(search(3)))
    plain["best"] = 3
    with pytest.raises(InputError, match="best: there is no candidate 3"):
        search_from_json(json.dumps(plain))


def put(*path):
    """Returns a change of the plain file: the value at the path's end becomes the last of `path`."""

    def change(plain):
        *way, last, value = path
        for step in way:
            plain = plain[step]
        plain[last] = value

    return change


WRONG = [
    (put("format", "sherd-timeline/2"), "format: expected 'sherd-timeline/1', found 'sherd-timeline/2'"),
    (lambda plain: plain.pop("format"), "format: expected 'sherd-timeline/1', found None"),
    (lambda plain: plain.pop("seconds"), "seconds: missing"),
    (lambda plain: plain["peak"].pop("moment"), "moment of peak: missing"),
    (put("colour", "red"), "'colour': unknown field"),
    (put("a\nb", 1), r"'a\nb': unknown field"),
    (put("seconds", "1"), "seconds: expected a number, found '1'"),
    (put("seconds", True), "seconds: expected a number, found True"),
    (put("seconds", 0), "seconds: expected more than 0, got 0.0"),
    (put("seconds", 10**400), "seconds: expected a number"),
    (put("title", None), "title: expected a text, found None"),
    (put("is_predicted", 1), "is_predicted: expected true or false, found 1"),
    (put("facts", "a\nb", 1), r"facts['a\nb']: expected a text, found 1"),
    (put("facts", []), "facts: expected an object, found []"),
    (put("peak", 1), "peak: expected an object, found 1"),
    (put("peak", "nbytes", 1.5), "peak.nbytes: expected a whole number, found 1.5"),
    (put("peak", "by_unit", {"one": 1}), "peak.by_unit: 'one' is no index of a unit"),
    (put("peak", "by_unit", {"99": 1}), "peak.by_unit: there is no unit 99"),
    (put("spans", []), "spans: expected an object of columns and rows, found []"),
    (put("spans", "columns", 0, "row"), "spans.columns: expected lane, name"),
    (put("spans", "rows", {}), "spans.rows: expected a list, found {}"),
    (put("spans", "rows", 1, []), "spans[1]: expected 6 values"),
    (put("spans", "rows", 1, 0, "lunch"), "spans[1].lane: expected one of compute, "),
    (put("spans", "rows", 1, 0, []), "spans[1].lane: expected one of compute, "),
    (put("spans", "rows", 1, 2, 99), "spans[1].unit: there is no unit 99"),
    (put("spans", "rows", 1, 4, -1), "spans[1].end: -1.0 comes before"),
    (put("changes", "rows", 3, 0, -0.5), "changes[3].time: -0.5 comes before"),
    (put("changes", "rows", 3, 2, -2), "changes[3].unit: there is no unit -2"),
]


def test_a_bad_file_is_refused_in_one_line_that_names_the_field():
    for change, told in WRONG:
        plain = json.loads(to_json(timeline(3)))
        change(plain)
        assert one_line(InputError, from_json, json.dumps(plain)).startswith(told), told
    for text in ("", "[", "[]", "1", '{"seconds": NaN}', "[" * 100_000, "1" * 5_000):
        assert one_line(InputError, from_json, text) not in ("", NOTHING), text[:99]
