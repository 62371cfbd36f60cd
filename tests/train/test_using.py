"""What was trained can be used: written with and judged as the run itself would."""

import contextlib
import io
import json
import math
import os
import re
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import sherd
from sherd.cli import main as cli
from sherd.cli import using
from sherd.cli.uses import asked, pick
from sherd.cli.using import generate, loaded, score
from sherd.cli.words import parse
from sherd.train import launch
from sherd.train.config import Config, read_tree, toml
from sherd.train.models import Decoder
from sherd.train.text import read_corpus
from tests.support.ranks.forked import answer_of
from tests.train.test_checkpoint import DATA, break_it, put
from tests.train.test_loop import TREE, write_report
from tests.train.test_models import hf_config

# Heads and an own head, so that tp can cut it.
CUT = {"kv_heads": 2, "tied": False, "steps": 4}


@pytest.fixture(scope="module")
def trained(world, text, tmp_path_factory):
    """A run's folder, and what it said."""
    out = tmp_path_factory.mktemp("trained") / "run"
    out.mkdir()
    config = Config.of(TREE, CUT, {"data": text})
    (out / "config.toml").write_text(toml(config))
    return out, world(2).run(write_report, config, out)[0]


def plain(out):
    """The trained model in this process, read as docs/do/train.md says."""
    model = Decoder(Config.of(read_tree(f"{out}/config.toml")))
    sherd.load(f"{out}/checkpoints", {"model": model}, random=False)
    return model.eval()


def commands(folder, *each):
    """The exit code of each command, what it said to stdout and to stderr. They run one after the other, alone."""
    os.chdir(folder)
    os.environ.pop("LOCAL_RANK", None)
    said = []
    for words in each:
        out, err = io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.StringIO()  # a terminal that knows no UTF-8
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([str(word) for word in words])
        out.flush()
        said.append((code, out.buffer.getvalue().decode(), err.getvalue()))
    return said


def everything_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def said(trained, text, tmp_path_factory):
    """By name, what commands said that were asked one after the other in one process."""
    out, _ = trained
    folder = tmp_path_factory.mktemp("said")
    (folder / "other.txt").write_text("words of another text")
    sample = ["generate", "--length", 9, "--seed", 7]
    asked = {
        "as the run": ["generate", out],
        "seed": [*sample, out],
        "seed again": [*sample, out],
        "checkpoint": [*sample, out / "checkpoints" / "step-00000004"],
        "greedy": [*sample, out, "--temperature", 0, "--prompt", "é, naïve"],
        "greedy, other seed": ["generate", "--length", 9, out, "--temperature", 0, "--prompt", "é, naïve"],
        "eval": ["eval", out],
        "json": ["eval", out, "--json"],
        "other": ["eval", out, "--json", "--data", "other.txt"],
    }
    before = everything_in(out)
    answers = dict(zip(asked, answer_of(commands, folder, *asked.values()), strict=True))
    assert everything_in(out) == before, "a command has changed the run"
    return folder, answers


def threads_of(out, few):
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(2)
    with mock.patch.object(using, "FEW_PARAMETERS", few):
        ((code, *_),) = commands(out, ["generate", out, "--length", 1])
    return code, torch.get_num_threads()


def test_a_small_model_writes_on_one_thread_unless_the_user_says_how_many(trained):
    assert answer_of(threads_of, trained[0], using.FEW_PARAMETERS) == (0, 1)
    assert answer_of(threads_of, trained[0], 1) == (0, 2)


def text_of(answer):
    code, out, err = answer
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    return out[:-1]


def test_the_text_is_the_runs_own_sample_or_that_of_a_seed_whichever_checkpoint_is_named(trained, said):
    answers = said[1]
    assert text_of(answers["as the run"]) == (trained[0] / "sample.txt").read_bytes().decode()
    assert answers["seed"] == answers["seed again"] == answers["checkpoint"]
    assert text_of(answers["seed"]) != text_of(answers["as the run"])[:9]


def test_greedy_text_is_what_plain_pytorch_finds_likeliest_whatever_the_seed(trained, said):
    model = plain(trained[0])
    tokens = list(b"\0" + "é, naïve".encode())
    for _ in range(9):
        tokens.append(int(model(torch.tensor([tokens[-16:]]))[0, -1].argmax()))
    assert text_of(said[1]["greedy"]) == bytes(tokens[1:]).decode(errors="replace").replace("\0", "\n\n")
    assert said[1]["greedy"] == said[1]["greedy, other seed"]


def test_eval_says_what_the_run_said_at_its_end(trained, text, said):
    out, told = trained
    found = json.loads(text_of(said[1]["json"]))
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["bits_per_byte"] == pytest.approx(last["bits"], rel=1e-6)
    assert found["nats_per_token"] == pytest.approx(last["bits"] * math.log(2), rel=1e-6)
    assert found["perplexity"] == pytest.approx(2 ** last["bits"], rel=1e-5)
    held_out = read_corpus(text, 16).held_out
    assert (found["step"], found["bytes"]) == (4, len(held_out))
    figures = f"{found['bits_per_byte']:.3f} bits per byte"
    assert text_of(said[1]["eval"]).startswith(figures)
    assert f"held-out  {figures}" in told


def test_eval_of_another_text_scores_all_of_it_as_plain_pytorch_does(trained, said):
    found, model = json.loads(text_of(said[1]["other"])), plain(trained[0])
    row = b"\0words of another text"
    # Windows of 16 that score their later 8 bytes, from NULs on.
    padded = torch.tensor([0] * 16 + list(row))
    losses = []
    for at in range(len(row)):
        end = 16 + (at // 8 + 1) * 8
        seen = padded[end - 17 : 16 + at]
        losses.append(F.cross_entropy(model(seen[None])[0, -1:], padded[16 + at][None]))
    assert found["bytes"] == len(row)
    assert found["nats_per_token"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_the_guides_lines_of_python_read_a_run(trained):
    guide = (Path(__file__).parents[2] / "docs/do/train.md").read_text()
    (lines,) = re.findall(r"^    import sherd\n(?:    .*\n|\n)+", guide, re.M)
    names = {}
    exec(textwrap.dedent(lines).replace("runs/1", str(trained[0])), names)
    assert names["logits"].shape == (1, 5, 256)


def on_a_mesh(out, mesh):
    args = parse(["generate", out, "--mesh", mesh, "--length", "9", "--seed", "7"])
    ask = asked(args, pick(out))
    judged = asked(parse(["eval", out, "--mesh", mesh]), ask.checkpoint)
    model = loaded(ask)
    return "".join(generate(model, ask, args)), score(model, judged)["bits_per_byte"]


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_ranks_that_share_a_model_write_and_judge_as_one_does(world, trained, said, mesh):
    for written, bits in world(2).run(on_a_mesh, str(trained[0]), mesh):
        assert written == said[1]["seed"][1]
        assert bits == pytest.approx(json.loads(said[1]["json"][1])["bits_per_byte"], rel=1e-5)


def as_rank(words):
    """The exit code of this rank, one of those that the command has started, and what it says to stdout and stderr."""
    with (
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
        mock.patch.object(using, "group", contextlib.nullcontext),  # there is one
        mock.patch.object(using.signal, "signal"),
        mock.patch("sys.stdout", io.TextIOWrapper(io.BytesIO())) as out,
        mock.patch("sys.stderr", io.StringIO()) as err,
    ):
        code = cli.main(words)
        return code, out.buffer.getvalue().decode(), err.getvalue()


def test_the_command_starts_ranks_of_which_the_first_writes_the_same_text(world, trained, said, monkeypatch):
    words = ["generate", str(trained[0]), "--nproc", "2", "--length", "9", "--seed", "7"]
    started = []
    monkeypatch.setattr(launch, "start", lambda *how: started.append(how) or 0)
    assert cli.main(words) == 0
    assert started == [(2, words)]
    assert world(2).run(as_rank, words) == [(0, said[1]["seed"][1], ""), (0, "", "")]


# What cannot be done


def as_one_rank_too_many(words):
    """What `as_rank` returns on a machine that has one device."""
    with (
        mock.patch("sherd.train.device.accelerator", return_value="xpu"),
        mock.patch("torch.accelerator.device_count", return_value=1),
    ):
        return as_rank(words)


def test_more_ranks_than_devices_are_refused_before_any_takes_one(world, trained):
    words = ["generate", str(trained[0]), "--nproc", "2"]
    (code, _, first), (_, _, second) = world(2).run(as_one_rank_too_many, words)
    assert (code, second) == (2, "")
    assert first == (
        "sherd generate: 2 ranks on a machine of 1 xpu device; start one per device, or set device = 'cpu'\n"
    )


REFUSED = [
    (["generate", "nowhere"], "nowhere is no folder; name a run's, as in runs/1, or a checkpoint's"),
    (["generate"], "there is no run under"),
    (["generate", "."], "checkpoints holds no checkpoint"),
    (["generate", "RUN", "--length", "-1"], "--length: -1 is out of its limits; it must be at least 0"),
    (["generate", "RUN", "--length", "many"], "--length: 'many' has the wrong type; it must be a whole number"),
    (["generate", "RUN", "--temperature", "nan"], "--temperature: nan has the wrong type; it must be a finite number"),
    (["generate", "RUN", "--nproc", "0"], "--nproc: 0 is out of its limits"),
    (["generate", "RUN", "--mesh", "xp=2"], "names 'xp=2', which is no axis"),
    (["generate", "RUN", "--mesh", "tp=4"], "does not divide heads = 2"),
    (["generate", "RUN", "--mesh", "dp=2", "--nproc", "3"], "is for 2 ranks, but there are 3"),
    (["generate", "RUN", "--device", "tpu"], "device = 'tpu', but torch sees no tpu here"),
    (["generate", "RUN", "--lenght", "3"], "unknown option --lenght; did you mean --length?"),
    (["eval", "RUN", "--data", "absent"], "cannot read the text absent"),
    (["eval", "RUN", "--data", "empty"], "empty holds no text"),
]


def test_what_cannot_be_used_is_refused_in_one_line(refused, trained, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, told in REFUSED:
        assert told in refused(*[word.replace("RUN", str(trained[0])) for word in words]), words


def test_a_damaged_run_and_a_changed_text_are_refused(refused, tmp_path):
    path = put(tmp_path / "run", 3, config=Config(data="text.txt").tree())
    assert "no longer holds the text that run/checkpoints/step-00000003 was trained on" in refused("eval", "run")
    break_it(path, "short file")
    torn = f"run/checkpoints/step-00000003/{DATA} has 2 of 76 bytes"
    assert f"run/checkpoints holds no complete checkpoint: {torn}" in refused("generate", "run")
    assert f"{path}/{DATA} has 2 of 76 bytes" in refused("generate", path)


# Hugging Face


def train_and_use(folder, config, *words):
    """A run into the folder `run`, then these commands: one process, for transformers takes seconds to load."""
    os.chdir(folder)
    with using.alone():
        write_report(config, Path("run"))
    return commands(folder, *words)


def test_a_hugging_face_model_writes_and_is_judged_as_the_run_did(text, tmp_path):
    pytest.importorskip("transformers")
    config = Config.of(TREE, {"hf": hf_config(tmp_path, num_hidden_layers=1), "data": text, "steps": 2})
    out = tmp_path / "run"
    out.mkdir()
    (code, written, _), (_, judged, _) = answer_of(
        train_and_use, tmp_path, config, ["generate", out], ["eval", out, "--json"]
    )
    assert code == 0
    assert written[:-1] == (out / "sample.txt").read_bytes().decode()
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(judged)["bits_per_byte"] == pytest.approx(last["bits"], rel=1e-6)
