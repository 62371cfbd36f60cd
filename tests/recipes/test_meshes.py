"""Recipes with a mesh axis of their own: any number of ranks that share them has the same losses."""

import pytest

from tests.recipes.pages import losses, printed_as_shown, section_of
from tests.test_examples import run

RECIPES = ["mixture_of_experts", "long_context", "pipeline"]


@pytest.mark.parametrize("name", RECIPES)
def test_it_prints_what_its_page_shows_and_one_process_has_the_same_losses(name, tmp_path):
    printed = printed_as_shown(name, tmp_path)
    found = losses(printed)
    (alone,) = run(f"recipes/{name}.py", tmp_path / "alone", "--steps", "20", num_ranks=1)
    assert found[-1] < found[0] - 2
    assert losses(alone) == pytest.approx(found[:3], abs=2e-3)
    assert f"`{alone.splitlines()[-1]}`" in section_of(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), [*zip(RECIPES, ("--ep", "--cp", "--pp"), strict=True)])
def test_replicas_of_the_axis_have_the_same_losses_too(name, axis, tmp_path):
    words = "--steps", "20", "--batch", "8"
    (alone,) = run(f"recipes/{name}.py", tmp_path / "alone", *words, num_ranks=1)
    printed, *_ = run(f"recipes/{name}.py", tmp_path / "four", *words, axis, "2", num_ranks=4)
    assert losses(printed) == pytest.approx(losses(alone), abs=2e-3)
