"""What a recipe's page shows, and what the recipe really prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_examples import ROOT, run

PAGES = ROOT / "docs/recipes"
NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def printed_as_shown(name: str, folder: Path) -> str:
    """Runs the first command of docs/recipes/NAME.md, and returns what rank 0 printed.

    The page shows the same words, and numbers without a decimal point; numbers with one may differ by a tenth.
    """
    page = (PAGES / f"{name}.md").read_text()
    command, *_ = re.findall(r"^    torchrun --nproc-per-node 2 examples/(recipes/.*)$", page, re.MULTILINE)
    program, *words = command.split()
    assert program == f"recipes/{name}.py"
    (shown, *_) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    printed, *silent = run(program, folder, *words)
    assert silent == [""]
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers, expected = ([float(each) for each in NUMBER.findall(text)] for text in (printed, shown))
    assert numbers == pytest.approx(expected, rel=0.1)
    return printed


def losses(text: str, name: str = "loss") -> list[float]:
    """The values of that loss, step by step."""
    return [float(found) for found in re.findall(rf"^step .*  {name} +(\d+\.\d+)", text, re.MULTILINE)]
