"""A doctor in processes of its own."""

import json

from tests.support.ranks.forked import start

PATIENCE_S = 400
"""Seconds until one that does not end counts as stuck, on a machine that has other work too."""


def findings_of(folder, program, words, environment=None, code=0):
    """What is found by `program`, called with `words` in `folder`, which ends with this exit code."""
    process = start(program, words.split(), environment or {}, folder=folder, output=folder / "said")
    process.join(PATIENCE_S)
    said = (folder / "said").read_text()
    assert process.exitcode == code, said + (folder / "said.err").read_text()
    return json.loads(said)["findings"]
