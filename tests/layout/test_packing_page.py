"""The tables of docs/understand/layouts.md show what the planner does today."""

import re

import pytest

from bench import padding


@pytest.mark.slow  # it computes the whole page; test_plan.py checks the same figures of a case at a time
def test_the_page_shows_what_the_planner_does():
    sections, page = padding.sections(), padding.PAGE.read_text()
    for marker in ("padding", "imbalance", "longest"):
        (shown,) = re.findall(rf"<!-- {marker} -->\n(.*?)\n<!-- /{marker} -->", page, re.DOTALL)
        assert shown == sections[marker], "python -m bench.padding --write"
    page = "before\n<!-- padding -->\n{}\n<!-- /padding -->\nbehind\n"
    assert padding.written(page.format("old")) == page.format(sections["padding"]), "more than its tables"


def test_the_times_that_the_page_shows_are_under_its_aim():
    (shown,) = re.findall(r"<!-- times -->\n(.*?)\n<!-- /times -->", padding.PAGE.read_text(), re.DOTALL)
    milliseconds = [int(cell) for cell in re.findall(r" (\d+) \|", shown)]
    assert len(milliseconds) == 2 * len(padding.PLACEMENTS)
    assert max(milliseconds) < 300
