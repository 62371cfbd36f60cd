"""docs/data/packing.csv and its summary in docs/understand/layouts.md show what the planner does today."""

import re

import pytest

from bench import padding
from bench.pages import as_csv, read_csv, written


def shown(marker):
    (text,) = re.findall(rf"<!-- {marker} -->\n(.*?)\n<!-- /{marker} -->", padding.PAGE.read_text(), re.DOTALL)
    return text


@pytest.mark.slow  # it computes all cases; test_plan.py checks the same figures of a case at a time
def test_the_data_show_what_the_planner_does():
    assert padding.DATA.read_text() == as_csv(padding.rows()), "python -m bench.padding --write"


def test_the_summary_is_that_of_the_data():
    assert shown("packing") == padding.summary(read_csv(padding.DATA)), "python -m bench.padding --write"


def test_only_what_is_between_the_marks_is_written():
    page = "before\n<!-- packing -->\n{}\n<!-- /packing -->\nbehind\n"
    assert written(page.format("old"), {"packing": r"new \1"}) == page.format(r"new \1")


def test_the_times_that_the_page_shows_are_under_its_aim():
    milliseconds = [int(cell) for cell in re.findall(r" (\d+) \|", shown("times"))]
    assert len(milliseconds) == 2 * len(padding.PLACEMENTS)
    assert max(milliseconds) < 300
