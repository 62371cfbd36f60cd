"""Which cases a run takes: every function in a quick run, every pair of values in `all`, every case in some share."""

import ast
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import suites
from tests.support.suites import covering, fewest, part, share_of_commit

SLOW_PACKAGES = {
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "ray",
    "torchtitan",
    "trl",
    "torchao",
    "matplotlib",
    "plotly",
}
SIZES = [(1,), (4,), (2, 2), (5, 4, 4), (4, 3, 3), (2, 2, 2, 2, 2), (10, 8, 3)]


def pairs_of(cases):
    return set().union(*(itertools.combinations(enumerate(case), 2) for case in cases))


def test_every_pair_of_values_is_in_one_of_few_cases_that_are_kept():
    for sizes in SIZES:
        cases = list(itertools.product(*map(range, sizes)))
        kept = [cases[place] for place in covering(cases)]
        assert pairs_of(kept) == pairs_of(cases)
        assert {(place, value) for case in kept for place, value in enumerate(case)} == {
            (place, value) for place, size in enumerate(sizes) for value in range(size)
        }
    for sizes, most in [((2, 2, 2, 2, 2), 8), ((5, 4, 4), 25), ((10, 8, 3), 90)]:
        assert len(covering(list(itertools.product(*map(range, sizes))))) <= most
    gaps = [case for case in itertools.product(range(3), repeat=3) if case[0] != case[1]]
    assert pairs_of([gaps[place] for place in covering(gaps)]) == pairs_of(gaps)


def test_of_values_all_are_kept_each_about_as_often_as_any_other():
    cases = list(itertools.product(range(9), range(4)))
    kept = [cases[place] for place in fewest([set(enumerate(case)) for case in cases])]
    assert [one for one, _ in kept] == list(range(9))
    assert sorted(Counter(other for _, other in kept).values()) == [2, 2, 2, 3]


def test_two_parameters_whose_numbers_are_added_up_each_meet_every_value_of_a_third(monkeypatch):
    monkeypatch.setattr(suites, "_suite", "quick")
    values = range(7)
    for parts in range(1, 5):
        for one in range(parts):
            taken = [value for other in range(parts) for value in part(values, one + other, parts)]
            assert sorted(taken) == list(values)


def test_ten_commits_in_a_row_have_all_shares_in_an_order_that_the_first_one_draws():
    commits = [f"{number:040x}" for number in range(60)]
    shares = [share_of_commit(commits[number::-1], 10) for number in range(60)]
    tens = [tuple(shares[start : start + 10]) for start in range(0, 60, 10)]
    assert all(sorted(ten) == list(range(10)) for ten in tens)
    assert len(set(tens)) > 1


TESTS = """
import pytest
from tests.support.suites import share

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

@pytest.mark.slow
def test_waits():
    pass
"""
RUNS = {
    (): "3 passed",
    ("--suite=all",): "10 passed",
    ("--suite=thorough",): "18 passed",
    ("test_drawn.py::test_pairs[1-1-1]",): "1 passed",
    ("test_drawn.py::test_waits",): "1 passed",
}


@pytest.mark.slow
def test_a_run_takes_the_cases_of_its_suite_and_every_share_together_all(tmp_path):
    (tmp_path / "test_drawn.py").write_text(TESTS)
    for words, counted in RUNS.items():
        assert f" {counted}" in said(tmp_path, *words)
    listed = [said(tmp_path, "--collect-only", "-q", f"--share={number}/3").split("\n\n")[0] for number in range(3)]
    assert len({line for each in listed for line in each.splitlines() if "::" in line}) == 10


def said(folder, *words):
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--color=no", *words]
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_other_packages_need_is_imported_by_the_tests_that_use_it_and_not_when_all_are_collected():
    """Each worker collects all files, and each rank imports the file of its test."""
    tests = Path(__file__).parent
    for file in sorted(tests.rglob("*.py")):
        if file.relative_to(tests).parts[0] in ("interop", "recipes"):
            continue
        for node in ast.parse(file.read_text()).body:
            asked = re.findall(r"^(?:import|from|.*importorskip\(['\"])\s*(\w+)", ast.unparse(node).partition("\n")[0])
            slow = SLOW_PACKAGES.intersection(asked)
            assert not slow, f"{file.relative_to(tests)}:{node.lineno} imports {slow}; import it in a fixture or a test"
