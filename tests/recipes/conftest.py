"""The fixture of the tests of recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.pages import on_a_rank


@pytest.fixture
def run(world: Callable[[int], Any]) -> Callable[..., list[str]]:
    """`run("recipes/NAME.py", folder, *words, num_ranks=2)`: what each rank of a kept pool prints."""

    def run_program(program: str, folder: Path, *words: str, num_ranks: int = 2) -> list[str]:
        return world(num_ranks).run(on_a_rank, program, str(folder), words)

    return run_program
