"""Muon and AdamW step a sharded model as in one process."""

import pytest

from tests.recipes.pages import losses, printed_as_shown
from tests.test_examples import run


def test_it_prints_what_its_page_shows_and_one_process_has_the_same_losses(tmp_path):
    found = losses(printed_as_shown("several_optimizers", tmp_path))
    (alone,) = run("recipes/several_optimizers.py", tmp_path / "alone", num_ranks=1)
    assert found[-1] < found[0] - 2
    assert losses(alone) == pytest.approx(found, abs=2e-3)
