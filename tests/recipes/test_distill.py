"""A student learns from a frozen, sharded teacher as in one process."""

import re

import pytest

from tests.recipes.pages import PAGES, losses, printed_as_shown
from tests.test_examples import run

pytest.importorskip("transformers")


@pytest.mark.slow
def test_the_student_comes_near_the_teacher_which_keeps_no_optimizer(tmp_path):
    printed = printed_as_shown("distill", tmp_path)
    for name in ("loss", "text loss"):
        found = losses(printed, name)
        assert found[-1] < found[0] / 1.5, name
    trained, frozen = re.findall(r"^teacher.*: (\d+\.\d+) MiB", printed, re.MULTILINE)
    assert float(frozen) < float(trained)


def test_ranks_change_no_loss(tmp_path):
    words = "--steps", "10", "--teacher-steps", "10", "--batch", "6"
    several, alone = (run("recipes/distill.py", tmp_path / f"of {n}", *words, num_ranks=n)[0] for n in (2, 1))
    assert losses(several) == pytest.approx(losses(alone), abs=2e-3)
    assert losses(several, "text loss") == pytest.approx(losses(alone, "text loss"), abs=2e-3)
    assert f"`{alone.splitlines()[-1]}`" in (PAGES / "distill.md").read_text()
