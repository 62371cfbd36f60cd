"""A served export answers with what the sharded model says."""

import contextlib
import json
import re
import time
import urllib.error
import urllib.request

import pytest

from tests.recipes.pages import losses, printed_as_shown
from tests.support.ranks import forked
from tests.test_examples import EXAMPLES, TIMEOUT_S, run, run_as_torchrun_would

pytest.importorskip("transformers")

RECIPE, PROMPT = "recipes/export_and_serve.py", "The following"


@pytest.mark.slow
def test_it_prints_what_its_page_shows(tmp_path):
    found = losses(printed_as_shown("export_and_serve", tmp_path))
    assert found[-1] < found[0] - 1


@contextlib.contextmanager
def served(folder, model):
    """The address at which a process answers with that model."""
    said = folder / "said"
    words = ["--serve", str(model), "--port", "0"]
    process = forked.start(run_as_torchrun_would, EXAMPLES / RECIPE, words, 0, 1, 0, folder=folder, output=said)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(r"^answers at (\S+)$", said.read_text() if said.exists() else "", re.MULTILINE)):
            is_starting = process.is_alive() and time.monotonic() < deadline
            assert is_starting, said.with_suffix(".err").read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.join()


def answer(url, body):
    with urllib.request.urlopen(url, body) as response:
        return json.load(response)["choices"][0]["text"]


def test_the_server_says_what_the_sharded_model_says(tmp_path):
    printed, silent = run(RECIPE, tmp_path, "--steps", "10", "--prompt", PROMPT)
    _, own = printed.split(f"{PROMPT} ... ")
    assert silent == ""
    with served(tmp_path, tmp_path / "out") as url:
        assert answer(url, json.dumps({"prompt": PROMPT}).encode()) == own.removesuffix("\n") != ""
        assert own.startswith(answer(url, json.dumps({"prompt": PROMPT, "max_tokens": 3}).encode()))
        for wrong in (b"{}", b"no JSON", b'["prompt"]'):
            with pytest.raises(urllib.error.HTTPError) as error:
                answer(url, wrong)
            error.value.close()
            assert (error.value.code, '{"prompt": "..."' in error.value.reason) == (400, True), wrong
