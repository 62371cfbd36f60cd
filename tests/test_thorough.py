"""Does an ordinary run of the tests still meet every value, and every pair of values of two parameters?"""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests import thorough
from tests.thorough import covering, fewest, part, share

SIZES = [(1,), (4,), (2, 2), (5, 4, 4), (4, 3, 3), (2, 2, 2, 2, 2), (10, 8, 3)]


@pytest.fixture(autouse=True)
def _ordinary(monkeypatch):
    monkeypatch.setattr(thorough, "_is_thorough", False)


def pairs_of(cases):
    return set().union(*(itertools.combinations(enumerate(case), 2) for case in cases))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_is_in_a_case_that_is_kept(sizes):
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[place] for place in covering(cases)]
    assert pairs_of(kept) == pairs_of(cases)
    assert {(place, value) for case in kept for place, value in enumerate(case)} == {
        (place, value) for place, size in enumerate(sizes) for value in range(size)
    }


@pytest.mark.parametrize(("sizes", "most"), [((2, 2, 2, 2, 2), 8), ((5, 4, 4), 25), ((10, 8, 3), 90)], ids=str)
def test_few_cases_are_kept(sizes, most):
    assert len(covering(list(itertools.product(*map(range, sizes))))) <= most


def test_of_values_all_are_kept_each_about_as_often_as_any_other():
    cases = list(itertools.product(range(9), range(4)))
    kept = [cases[place] for place in fewest([set(enumerate(case)) for case in cases])]
    assert [one for one, _ in kept] == list(range(9))
    assert sorted(Counter(other for _, other in kept).values()) == [2, 2, 2, 3]


def test_of_cases_that_do_not_have_all_combinations_every_pair_that_there_is_is_kept():
    cases = [case for case in itertools.product(range(3), repeat=3) if case[0] != case[1]]
    assert pairs_of([cases[place] for place in covering(cases)]) == pairs_of(cases)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_two_parameters_whose_numbers_are_added_up_each_meet_every_value_of_a_third(parts):
    values, numbers = range(7), range(parts)
    for one in numbers:
        assert sorted(value for other in numbers for value in part(values, one + other, parts)) == list(values)


def test_a_thorough_run_takes_all(monkeypatch):
    assert (share(3, 7), part("abcd", 1, 2)) == (3, ["b", "d"])
    thorough_run = True
    monkeypatch.setattr(thorough, "_is_thorough", thorough_run)
    assert (share(3, 7), part("abcd", 1, 2)) == (7, ["a", "b", "c", "d"])


TESTS = """
import pytest
from tests.thorough import share

@pytest.mark.pairs
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [0, 1])
def test_pairs(a, b, c):
    pass

@pytest.mark.values
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1, 2])
def test_values(a, b):
    pass

@pytest.mark.parametrize("case", range(share(2, 3)))
def test_cases(case):
    pass
"""


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        ([], "9 passed, 7 deselected"),
        (["--thorough"], "17 passed"),
        (["test_drawn.py::test_pairs[1-1-1]"], "1 passed"),
    ],
    ids=["ordinary", "thorough", "one by its name"],
)
def test_what_an_ordinary_run_can_do_without_is_left_out(tmp_path, words, counted):
    (tmp_path / "test_drawn.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--color=no", *words]
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert f" {counted} in " in done.stdout, done.stdout + done.stderr
