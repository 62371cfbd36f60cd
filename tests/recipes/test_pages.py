"""Every recipe has its section on a page, with a picture of its loss."""

from tests.recipes.pages import PAGES, PROGRAM, SECTIONS, section_of
from tests.test_examples import EXAMPLES

RECIPES = [path for path in (EXAMPLES / "recipes").glob("*.py") if '__name__ == "__main__"' in path.read_text()]


def test_every_recipe_is_short_says_how_to_run_it_and_has_a_section_and_a_small_picture():
    assert len(RECIPES) > 5
    for path in RECIPES:
        text = path.read_text()
        assert len(text.splitlines()) < 120, path
        command = f"torchrun --nproc-per-node 2 examples/recipes/{path.name}"
        assert command in text, path
        section = section_of(path.stem)
        assert f"    {command}" in section, path
        assert f"]({path.stem}.svg)" in section, path
        assert (PAGES / f"{path.stem}.svg").stat().st_size < 15_000, path


def test_every_section_is_a_recipes():
    assert sorted(PROGRAM.search(section)[1] for section in SECTIONS) == sorted(path.stem for path in RECIPES)
