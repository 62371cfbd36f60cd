"""A vision model trains in bfloat16, and its average over time is that of one process."""

import pytest

from tests.recipes.pages import assert_shows_memory_of_one_rank, losses, printed_as_shown


def test_the_average_is_judged_beside_the_model(run, tmp_path):
    printed = printed_as_shown("vision", tmp_path, run)
    for name in ("loss", "averaged loss"):
        first, *_, last = losses(printed, name)
        assert last < first


def test_two_ranks_have_the_losses_and_averages_of_one(run, tmp_path):
    words = "--float32", "--steps", "40", "--batch", "6"
    two, one = (run("recipes/vision.py", tmp_path, *words, num_ranks=num)[0] for num in (2, 1))
    assert_shows_memory_of_one_rank("vision", one)
    for name in ("loss", "averaged loss"):
        assert losses(two, name) == pytest.approx(losses(one, name), abs=2e-3)
