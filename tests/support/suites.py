"""Which cases a run of the tests takes: `pytest --suite quick|all|thorough`, and shares of them.

    quick       one case of each test function; the function's name draws which one, so that functions with the same
                parameters try different values; without functions marked `slow`
    all         every case; of functions marked `pairs` or `values`, those with every pair of values, or every value
    thorough    every case, and more examples of what is drawn at random

A case that is asked for by its name (`file.py::test`) is always tried. How a test says what can be left out:

    @pytest.mark.slow                                    # campaigns, kills, what waits: never in a quick run
    @pytest.mark.pairs                                   # on a test with three parameters or more
    @pytest.mark.values                                  # where two parameters have little to do with each other
    part(PLACEMENTS, turn, len(PLACEMENTS))              # where a loop in the test goes over a parameter
    share(60, 200)                                       # cases drawn at random: of `all`, of `thorough`
    settings(max_examples=examples(60))                  # examples of hypothesis, for which `quick` takes fewer
    fewest([values_of(case) for case in CASES])          # cases that together have every value
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Literal, TypeVar, get_args

import pytest

T = TypeVar("T")
Suite = Literal["quick", "all", "thorough"]
SUITES: tuple[Suite, ...] = get_args(Suite)

QUICK_EXAMPLES = 20  # of hypothesis, for each property
_suite: Suite = "quick"


def begin(suite: Suite) -> None:
    """Note which suite this run is, before tests are imported."""
    global _suite
    _suite = suite


def share(few: T, many: T) -> T:
    """Returns `few`, or `many` in a thorough run: how many cases to draw, or which."""
    return many if _suite == "thorough" else few


def examples(usual: int) -> int:
    """Returns how many examples hypothesis tries: `usual`, 20 at most in a quick run, three times as many in a thorough
    one."""
    return {"quick": min(usual, QUICK_EXAMPLES), "all": usual, "thorough": 3 * usual}[_suite]


def part(values: Iterable[T], turn: int, parts: int) -> list[T]:
    """Returns every value in a thorough run, else one in `parts`, others at the next turn.

    With the numbers of two other parameters added up for `turn`, each of them meets every value, once both have taken
    `parts` numbers in a row.
    """
    return list(values)[slice(None) if _suite == "thorough" else slice(turn % parts, None, parts)]


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Returns the places of some of `cases` that have every pair of values of two parameters that all of them have.

    Cases with one parameter are kept, all of them.
    """
    return fewest([set(itertools.combinations(enumerate(case), 2)) or {place} for place, case in enumerate(cases)])


def fewest(sets: Sequence[Collection[Hashable]]) -> list[int]:
    """Returns the places of some of `sets` that together have everything that all of them have.

    Each next one brings the most; of several that do, the one whose other things were taken least often, the first.
    """
    missing, taken = set().union(*sets), Counter[Hashable]()
    kept = []
    while missing:
        best = max(
            range(len(sets)),
            key=lambda place: (len(missing.intersection(sets[place])), -sum(taken[each] for each in sets[place])),
        )
        kept.append(best)
        missing.difference_update(sets[best])
        taken.update(sets[best])
    return sorted(kept)


def usual(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns all cases, but of functions marked `pairs` or `values` only those that have all of these."""
    kept: list[pytest.Item] = []
    for cases in by_function(items).values():
        by_pairs = cases[0].get_closest_marker("pairs")
        if by_pairs or cases[0].get_closest_marker("values"):
            # The values are those in the lists of `parametrize`, whatever they are: the same object in each case.
            values = [[id(value) for value in case.callspec.params.values()] for case in cases]
            places = covering(values) if by_pairs else fewest([set(enumerate(case)) for case in values])
            kept += [cases[place] for place in places]
        else:
            kept += cases
    return kept


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns one case of each function that is not marked `slow`, drawn by its name."""
    return [
        cases[zlib.crc32(name.encode()) % len(cases)]
        for name, cases in by_function(usual(items)).items()
        if not cases[0].get_closest_marker("slow")
    ]


SELECTED = {"quick": quick, "all": usual, "thorough": list}


def drawn(items: Sequence[pytest.Item], number: int, count: int) -> list[pytest.Item]:
    """Returns share `number` of `count` of the cases: every case is in one share, the same on every machine."""
    return [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number % count]


def by_function(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Returns the cases of each test function, by its name in the form `file.py::test`."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def share_of_commit(ancestors: Sequence[str], count: int) -> int:
    """Returns which of `count` shares a commit has: ten commits in a row, counted from the first one, have all ten.

    Their order is drawn by the hash of the first of these ten, so that no commit can tell what its share leaves out.

    Args:
        ancestors: hashes of the commit and those before it along first parents, the newest first.
        count: how many shares there are.
    """
    place = (len(ancestors) - 1) % count
    return random.Random(ancestors[place]).sample(range(count), count)[place]
