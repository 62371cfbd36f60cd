"""How tests call `sherd` in this process."""

from __future__ import annotations

from typing import Any

import pytest

from sherd.cli.main import main
from sherd.train.codes import BAD_INPUT


def refusal(capsys: pytest.CaptureFixture[str], *words: Any, code: int = BAD_INPUT) -> str:
    """Returns the line in which `sherd` says why it refuses `words`, the first of which is the command's name. Of bad
    input it prints nothing else."""
    assert main([str(word) for word in words]) == code, words
    out, err = capsys.readouterr()
    assert out == "" or code != BAD_INPUT, words
    assert err.count("\n") == 1, err
    assert err.startswith(f"sherd {words[0]}: "), err
    return err
