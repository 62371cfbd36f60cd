"""What does an ordinary run of the tests leave to a thorough one, `pytest --thorough`?

An ordinary run makes each check with each value of each of its parameters, and most checks with each pair of values
of two of them, but not with every combination of three; and of what is drawn at random it takes fewer cases. A thorough
run takes all.

    @pytest.mark.pairs                                   # on a test with three parameters or more
    @pytest.mark.values                                  # where two parameters have little to do with each other
    part(PLACEMENTS, turn, len(PLACEMENTS))              # where a loop in the test goes over a parameter
    share(60, 200)                                       # cases drawn at random
    fewest([values_of(case) for case in CASES])          # or those of them that have every value
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

_is_thorough = False


def begin(is_thorough: bool) -> None:
    """Note what run this is, before tests are imported."""
    global _is_thorough
    _is_thorough = is_thorough


def share(few: T, many: T) -> T:
    """How many cases to draw, or which: `few`, or `many` in a thorough run."""
    return many if _is_thorough else few


def part(values: Iterable[T], turn: int, parts: int) -> list[T]:
    """Every value in a thorough run, else those whose turn it is: one in `parts`, others at the next turn.

    With the numbers of two other parameters added up for `turn`, each of them meets every value, once both have taken
    `parts` numbers in a row.
    """
    return list(values)[slice(None) if _is_thorough else slice(turn % parts, None, parts)]


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Some of `cases`, by their places: they have every pair of values of two parameters that all of them have.

    Cases with one parameter are kept, all of them.
    """
    return fewest([set(itertools.combinations(enumerate(case), 2)) or {place} for place, case in enumerate(cases)])


def fewest(sets: Sequence[Collection[Hashable]]) -> list[int]:
    """Some of `sets`, by their places: they have everything that all of them have.

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


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those cases of tests marked `pairs` or `values` that an ordinary run can do without."""
    by_test: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs") or item.get_closest_marker("values"):
            by_test.setdefault((item.nodeid.partition("[")[0], bool(item.get_closest_marker("pairs"))), []).append(item)
    left = []
    for (_, by_pairs), cases in by_test.items():
        # The values are those in the lists of `parametrize`, whatever they are: the same object in each case.
        values = [[id(value) for value in case.callspec.params.values()] for case in cases]
        kept = set(covering(values) if by_pairs else fewest([set(enumerate(case)) for case in values]))
        left += [case for place, case in enumerate(cases) if place not in kept]
    return left
