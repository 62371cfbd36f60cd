"""What a recipe's page shows, and what the recipe really prints."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.test_examples import EXAMPLES, ROOT, run

PAGES = ROOT / "docs/recipes"
SECTIONS = [section for page in sorted(PAGES.glob("*.md")) for section in page.read_text().split("\n## ")[1:]]
PROGRAM = re.compile(r"\[`examples/recipes/(\w+)\.py`\]\(\.\./\.\./examples/recipes/\1\.py\)")
NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def section_of(name: str) -> str:
    """The section about examples/recipes/NAME.py, which begins with a link to it."""
    (found,) = [section for section in SECTIONS if PROGRAM.search(section)[1] == name]
    return found


def on_a_rank(program: str, folder: str, words: Sequence[str]) -> str:
    """Runs a program of examples/ on a rank of a kept pool, where its packages are imported once; what it prints."""
    path, before = EXAMPLES / program, os.getcwd()
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # not a semaphore, which a rank that is killed leaves behind
    os.chdir(folder)
    try:
        with (
            mock.patch.object(dist, "destroy_process_group"),  # which is the pool's
            mock.patch.object(sys, "argv", [str(path), *words]),
            mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
            redirect_stdout(io.StringIO()) as printed,
            redirect_stderr(io.StringIO()) as said,  # bars of progress, and why arguments are refused
        ):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit:
        raise SystemExit(said.getvalue()) from None
    finally:
        os.chdir(before)
    return printed.getvalue()


def printed_as_shown(name: str, folder: Path, run: Callable[..., list[str]] = run) -> str:
    """Runs the first command of its section in docs/recipes, by `run`, and returns what rank 0 printed.

    The section shows the same words, and numbers without a decimal point; numbers with one may differ by a tenth.
    """
    page = section_of(name)
    command, *_ = re.findall(r"^    torchrun --nproc-per-node 2 examples/(recipes/.*)$", page, re.MULTILINE)
    program, *words = command.split()
    assert program == f"recipes/{name}.py"
    (shown, *_) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    printed, *silent = run(program, folder, *words)
    assert silent == [""]
    assert_alike(printed, shown)
    return printed


def assert_alike(printed: str, shown: str) -> None:
    """The same words, and numbers that differ by a tenth, or by 0.1 where they are smaller than 1."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers, expected = ([float(each) for each in NUMBER.findall(text)] for text in (printed, shown))
    assert numbers == pytest.approx(expected, rel=0.1, abs=0.1)


def assert_shows_memory_of_one_rank(name: str, printed: str) -> None:
    """The section repeats the last line that one rank prints, which says what it keeps."""
    (shown,) = re.findall(r"On one rank the last line is `(.*?)`", section_of(name), re.DOTALL)
    assert_alike(printed.splitlines()[-1], " ".join(shown.split()))


def losses(text: str, name: str = "loss") -> list[float]:
    """The values of that loss, step by step."""
    return [float(found) for found in re.findall(rf"^step .*  {name} +(\d+\.\d+)", text, re.MULTILINE)]
