"""Models drawn at random, sharded at random, train as in one process.

Each case is some seeds on as many ranks as they say; what fails is named with its program, to be pasted into a test.
`python -m tests.random_programs` tries as many as one likes, and shrinks those that fail.
"""

import dataclasses
import itertools

import pytest

from tests.random_programs.programs import Layer, Program, draw, every, legal, shown, simpler
from tests.random_programs.search import failing
from tests.random_programs.training import plain
from tests.support.suites import share

NUM_SEEDS = share(40, 200)
TOGETHER = 10


def batches():
    """All seeds, those on equally many ranks together."""
    by_ranks = {}
    for seed in range(NUM_SEEDS):
        by_ranks.setdefault(draw(seed).num_ranks, []).append(seed)
    return [each[at : at + TOGETHER] for each in by_ranks.values() for at in range(0, len(each), TOGETHER)]


def assert_train_as_in_one_process(world, seeds):
    found = list(failing(world, [draw(seed) for seed in seeds]))
    assert not found, "\n\n".join(
        f"seed {each.program.seed}: {each.kind}\n{shown(each.program)}\n{each.said}" for each in found
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", batches(), ids=str)
def test_random_programs_train_as_in_one_process(world, seeds):
    assert_train_as_in_one_process(world, seeds)


def test_a_few_random_programs_train_as_in_one_process(world):
    assert_train_as_in_one_process(world, [seed for seed in range(NUM_SEEDS) if draw(seed).num_ranks == 2][:3])


def test_programs_are_drawn_with_every_feature_legal_and_shown_as_they_are():
    programs = [draw(seed) for seed in range(400)]
    assert draw(7) == programs[7]
    assert len(set(programs[:50])) == 50
    for kind, drawn in (Program, programs), (Layer, [layer for each in programs for layer in every(each.layers)]):
        for field in dataclasses.fields(kind):
            values = {getattr(each, field.name) for each in drawn}
            assert len(values) > 1 or field.name == "steps", field.name
    for program in programs[:20]:
        assert legal(program) == program
        assert eval(shown(program), {"Program": Program, "Layer": Layer}) == program
        for each in itertools.islice(simpler(program), 5):
            assert each != program
            assert len(list(every(each.layers))) <= len(list(every(program.layers)))


@pytest.mark.slow
def test_plain_torch_can_run_what_is_drawn():
    for seed in range(0, 1000, 20):
        plain(draw(seed))
