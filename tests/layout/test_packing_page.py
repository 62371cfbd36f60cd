"""The tables of docs/packing.md show what the planner does today."""

import re

import pytest

from bench import padding


@pytest.mark.parametrize("marker", ["padding", "imbalance", "longest"])
def test_the_page_shows_what_the_planner_does(marker):
    (shown,) = re.findall(rf"<!-- {marker} -->\n(.*?)\n<!-- /{marker} -->", padding.PAGE.read_text(), re.DOTALL)
    assert shown == padding.sections()[marker], "python -m bench.padding --write"


def test_writing_the_page_changes_its_tables_only():
    page = "before\n<!-- padding -->\nold\n<!-- /padding -->\nbehind\n"
    written = padding.written(page)
    assert written == f"before\n<!-- padding -->\n{padding.sections()['padding']}\n<!-- /padding -->\nbehind\n"


def test_the_times_that_the_page_shows_are_under_its_aim():
    (shown,) = re.findall(r"<!-- times -->\n(.*?)\n<!-- /times -->", padding.PAGE.read_text(), re.DOTALL)
    milliseconds = [int(cell) for cell in re.findall(r" (\d+) \|", shown)]
    assert len(milliseconds) == 2 * len(padding.PLACEMENTS)
    assert max(milliseconds) < 300
