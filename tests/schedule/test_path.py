"""A rank knows by itself where it leaves the path on which all ranks have agreed, and what the others do there."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from sherd.schedule import path as module
from sherd.schedule.path import Path

TRAIN = ["ga", "gb", "gc", "gb", "rc", "ga", "rb", "ra"]
EVAL = ["ga", "gb", "gc"]

steps = st.sampled_from(["ga", "gb", "gc", "ra", "rb", "rc"])
passes = st.lists(st.lists(steps, min_size=1, max_size=6), min_size=1, max_size=3)
loops = st.lists(st.lists(steps, min_size=1, max_size=6), min_size=1, max_size=3, unique_by=tuple)


def asked(path: Path[str], of_pass: list[str]) -> list[int]:
    """The steps of one pass, by their place, before which a rank has to ask; all ranks then agree."""
    path.begin()
    found = []
    for number, step in enumerate(of_pass):
        path.take(step)
        if not path.is_sure:
            found.append(number)
            path.agree()
    return found


def settled(*of_passes: list[str], times: int = 4) -> Path[str]:
    """A path that has gone through these passes so many times."""
    path = Path()
    for _ in range(times):
        for each in of_passes:
            asked(path, each)
    return path


def test_a_settled_loop_never_asks_passes_that_take_turns_neither_and_an_evaluation_now_and_then_little():
    path = Path()
    counts = [len(asked(path, TRAIN)) for _ in range(6)]
    assert counts[0] == len(TRAIN)
    assert counts[3:] == [0, 0, 0]
    path = settled(EVAL, TRAIN)
    assert asked(path, EVAL) == asked(path, TRAIN) == []
    path = settled(TRAIN, TRAIN, TRAIN, EVAL, times=3)
    assert sum(len(asked(path, each)) for each in (TRAIN, TRAIN, TRAIN, EVAL)) <= 2


@given(st.lists(passes, min_size=1, max_size=4))
def test_ranks_that_take_the_same_way_ask_at_the_same_places(program):
    one, other = Path(), Path()
    for of_pass in (each for some in program for each in some):
        assert asked(one, of_pass) == asked(other, of_pass)


@given(loops, st.data())
def test_a_rank_that_leaves_a_settled_path_is_unsure_at_once_and_knows_what_the_others_do(loop, data):
    path = settled(*loop, times=6)
    for of_pass in loop[:-1]:
        assert asked(path, of_pass) == []
    path.begin()
    known = loop[-1]
    place = data.draw(st.integers(0, len(known)))
    other = data.draw(steps)
    for step in known[:place]:
        path.take(step)
        assert path.is_sure
    following = (known[place:] + [step for of_pass in loop for step in of_pass])[: len(known)]
    if place < len(known):
        if other == known[place]:
            return
        path.take(other)
    else:
        path.take(other)  # the others have begun the next pass
    assert not path.is_sure
    assert list(islice(path.expected(), len(following))) == following
    path.take("ga")
    assert not path.is_sure
    path.agree()
    assert path.is_sure


def test_a_pass_that_begins_early_is_noticed_at_its_first_step():
    path = settled(TRAIN)
    path.begin()
    path.take("ga")
    path.begin()
    assert not path.is_sure
    path.take("ga")
    assert not path.is_sure
    assert next(path.expected()) == "gb"


def test_places_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(module, "MOST_PLACES", 50)
    path = Path()
    for number in range(100):
        asked(path, [f"g{number}", "ga"])
        assert path._num_places <= 60
    assert [len(asked(path, EVAL)) for _ in range(6)][-1] == 0
