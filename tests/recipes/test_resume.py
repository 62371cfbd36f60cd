"""A run that goes on with another number of ranks has the losses of a run that nothing has broken."""

import pytest

from sherd.cli.main import main
from tests.recipes.pages import losses, printed_as_shown
from tests.test_examples import run

RECIPE = "recipes/resume.py"


def test_three_ranks_go_on_where_two_stopped_as_one_that_never_stops(tmp_path):
    begun = losses(printed_as_shown("resume", tmp_path))
    went_on, *_ = run(RECIPE, tmp_path, num_ranks=3)
    (unbroken,) = run(RECIPE, tmp_path / "unbroken", num_ranks=1)
    assert went_on.startswith("3 ranks go on after step 30, which 2 ranks saved\nstep  40  ")
    assert [*begun, *losses(went_on)] == pytest.approx(losses(unbroken), abs=2e-4)
    assert begun[-1] < begun[0] - 2
    (nothing_left,) = run(RECIPE, tmp_path / "again", "--out", str(tmp_path / "run"), num_ranks=1)
    assert nothing_left == "1 ranks go on after step 60, which 3 ranks saved\n"


@pytest.mark.slow
def test_the_next_start_has_the_rate_that_it_is_given(tmp_path, capsys):
    run(RECIPE, tmp_path, "--stop", "10")
    run(RECIPE, tmp_path, "--stop", "20", "--lr", "0.0")
    saved = [str(tmp_path / f"run/step-000000{step}") for step in (10, 20)]
    assert main(["diff", *saved, "--model-only"]) == 0, capsys.readouterr().out


def test_a_batch_that_the_ranks_cannot_share_is_refused_in_a_line(tmp_path):
    with pytest.raises(AssertionError, match="--batch 5: expected a multiple of the 2 ranks"):
        run(RECIPE, tmp_path, "--batch", "5")
