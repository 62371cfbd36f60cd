"""Steps of a user's own model run, so that its operations can be timed, and a wrong one is refused in a line."""

import json
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sherd.cli.own_model import steps_of
from sherd.tools.doctor import operations
from sherd.tools.doctor.operations import timed_operations
from sherd.tools.simulate.work import Op, OpKind
from tests.doctor.test_bandwidth import FACTORY
from tests.planning.models import LLAMA
from tests.support.commands import refusal

CONFIG = """
[model]
layers = 4
width = 32
heads = 2
kv_heads = 2
experts = 4
[data]
context = 16
[run]
precision = "bf16"
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 131072}))
    (tmp_path / "made.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def timed(spec):
    return timed_operations(steps_of(spec, (1, 4)), 256)


@pytest.mark.parametrize(
    ("spec", "num_steps", "names"),
    [
        ("train.toml", 2, {"mm.bfloat16", "topk.float32"}),
        ("llama.json", 4, {"mm.bfloat16", "mm.float32", "silu_backward.float32"}),
        ("made.py:make", 4, {"convolution.float32", "convolution_backward.bfloat16"}),
    ],
)
def test_the_operations_of_a_model_are_timed(world, files, spec, num_steps, names):
    assert len(list(steps_of(spec, (1, 4)))) == num_steps
    for found in world(2).run(timed, str(files / spec)):
        assert found.keys() >= names, sorted(found)
        assert all(each.seconds > 0 for every in found.values() for each in every)


def test_of_a_step_that_is_timed_again_the_fastest_time_counts():
    times, asked = iter([3.0, 1.0, 2.0]), []

    def run(step):
        yield Op(OpKind.COPY, "aten.copy", 0, 8, "float32", 0), next(times)

    def three(least, seconds):
        asked.append((least, seconds))
        return range(3)

    with mock.patch.multiple(operations, _run=run, until=three):
        found = timed_operations([lambda: None], seconds_each=7.0)
    assert [each.seconds for each in found["copy.float32"]] == [1.0]
    assert asked == [(1, 7.0)]


def counted(least, seconds):
    """How often a rank goes on, of which the second is slower."""
    return [time.sleep(0.01 * dist.get_rank()) or number for number in operations.until(least, seconds)]


def test_all_ranks_go_on_equally_often(threads):
    for least, seconds in ((1, 0.0), (4, 0.0), (1, 0.1)):
        one, other = threads(2).run(counted, least, seconds)
        assert one == other == list(range(len(one)))
        assert len(one) == least if seconds == 0 else len(one) >= least


@pytest.mark.usefixtures("files")
def test_values_are_neither_denormal_nor_out_of_range():
    for step in steps_of("llama.json", [2]):
        model, batch, loss = step.args
        assert batch["input_ids"].shape == (2, 512)
        assert len(batch["input_ids"].unique()) > 50
        assert all(torch.isfinite(each).all() for each in model.parameters())
        assert 0.5 < loss(model, batch).item() < 50


@pytest.mark.usefixtures("files")
def test_what_cannot_be_timed_is_told_in_one_line(capsys):
    for words, says in (
        ("--model made.py:make", "--model made.py:make goes with --bandwidth, and is for CPUs"),
        ("--bandwidth box.toml --model made.py:fails", "returned int"),
        ("--bandwidth box.toml --model none.json", "none.json: not found"),
        ("--bandwidth box.toml --model made.py:make --samples 0", "0 is out of its limits; it must be at least 1"),
        ("--bandwidth box.toml --model made.py:make --samples 1;4", "'1;4'"),
    ):
        assert says in refusal(capsys, "doctor", *words.split()), words
