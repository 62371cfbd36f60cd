"""Do models drawn at random, sharded at random, train as in one process?

Each case is some seeds on as many ranks as they say; what fails is named with its program, to be pasted into a test.
`python -m tests.random_programs` tries as many as one likes, and shrinks those that fail.
"""

import dataclasses

import pytest

from tests.random_programs.programs import (
    Layer,
    Program,
    draw,
    every,
    features,
    legal,
    shown,
    simpler,
    without,
)
from tests.random_programs.search import failing
from tests.random_programs.training import InvalidProgram, plain
from tests.support.suites import share

NUM_SEEDS = share(40, 200)
TOGETHER = 10

NOT_YET = ("none",)
"""Features that are known to fail. A rank that uses none of a unit takes part in its reduction, but not where that unit
is reached on other ranks alone: by a gradient of a gradient, a loss left on a module, a recomputation."""


def batches():
    """All seeds, those on equally many ranks together."""
    by_ranks = {}
    for seed in range(NUM_SEEDS):
        by_ranks.setdefault(draw(seed).num_ranks, []).append(seed)
    for num_ranks, seeds in sorted(by_ranks.items()):
        for start in range(0, len(seeds), TOGETHER):
            yield num_ranks, tuple(seeds[start : start + TOGETHER])


@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    [pytest.param(*each, id=f"{each[0]} ranks, {each[1][0]} to {each[1][-1]}") for each in batches()],
)
def test_random_programs_train_as_in_one_process(world, num_ranks, seeds):
    programs = [without(draw(seed), NOT_YET) for seed in seeds]
    assert {each.num_ranks for each in programs} == {num_ranks}
    found = list(failing(world, programs))
    assert not found, "\n\n".join(
        f"seed {each.program.seed}: {each.kind}\n{shown(each.program)}\n{each.said}" for each in found
    )


# The generator


def test_a_seed_is_always_the_same_program_and_another_one_another():
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50


def test_what_is_switched_off_is_not_there():
    for seed in range(100):
        program = without(draw(seed), NOT_YET)
        assert not features(program) & set(NOT_YET)
        assert legal(program) == program


def test_every_feature_is_drawn():
    drawn = set().union(*(features(draw(seed)) for seed in range(400)))
    fields = {each.name for kind in (Program, Layer) for each in dataclasses.fields(kind)}
    assert fields - drawn <= {"seed", "num_ranks", "layers", "children", "steps", "core"}
    assert set(NOT_YET) <= drawn


def test_simpler_programs_have_less_in_them():
    program = draw(3)
    for each in simpler(program):
        assert each != program
        assert len(list(every(each.layers))) <= len(list(every(program.layers)))


def test_what_is_shown_is_the_program():
    for seed in range(20):
        program = draw(seed)
        assert eval(shown(program), {"Program": Program, "Layer": Layer}) == program


def test_plain_torch_can_run_what_is_drawn():
    for seed in range(0, 1000, 20):
        try:
            plain(draw(seed))
        except InvalidProgram as error:
            raise AssertionError(f"seed {seed}: {error}") from error
