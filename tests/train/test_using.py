"""What was trained can be used: written with, judged and exported as the run itself would; nothing is overwritten."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from sherd.cli import main as cli
from sherd.cli import using
from sherd.cli.uses import FORMS, asked, pick
from sherd.cli.using import generate, loaded, score
from sherd.cli.words import parse
from sherd.storage.folder import Folder
from sherd.storage.places import Disk
from sherd.train import launch
from sherd.train.config import Config
from sherd.train.models import Decoder
from sherd.train.plain import export, load_model
from sherd.train.text import read_corpus
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.forked import answer_of
from tests.train.test_checkpoint import DATA, break_it, put
from tests.train.test_loop import TREE, write_report
from tests.train.test_models import hf_config

# Heads, layers and an own head, so that each axis can cut it.
MODEL = {**TREE["model"], "kv_heads": 2, "tied": False}
RUN = {**TREE["run"], "steps": 4, "eval_every": 2, "sample": 12, "prompt": "the naïve ", "temperature": 1.0}


@pytest.fixture(scope="module")
def trained(world, text, tmp_path_factory):
    """A run's folder, and what it said."""
    out = tmp_path_factory.mktemp("trained") / "run"
    out.mkdir()
    config = Config.of(TREE, {"model": MODEL, "data": {"path": text}, "run": RUN})
    return out, world(2).run(write_report, config, out)[0]


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
        "best": [*sample, out, "--best"],
        "two": [*sample, "--num", 2, out],
        "greedy": [*sample, out, "--temperature", 0, "--prompt", "é, naïve"],
        "greedy, other seed": ["generate", "--length", 9, out, "--temperature", 0, "--prompt", "é, naïve"],
        "eval": ["eval", out],
        "json": ["eval", out, "--json"],
        "other": ["eval", out, "--json", "--data", "other.txt"],
        "pt": ["export", out, "model.pt"],
        "safetensors": ["export", out, "model.safetensors"],
        "again": ["export", out, "model.pt"],
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
    assert text_of(answers["as the run"]) == (trained[0] / "sample.txt").read_text()
    assert text_of(answers["as the run"]).startswith("the naïve ")
    assert pick(str(trained[0]), best=True).step == 4
    assert answers["seed"] == answers["seed again"] == answers["checkpoint"] == answers["best"]
    assert answers["seed"] != answers["as the run"]
    # Several samples stand between dashes, and the first is the only one of before.
    first, second = text_of(answers["two"]).split("\n---------------\n")
    assert first == text_of(answers["seed"])
    assert second != first


def test_greedy_text_is_what_plain_pytorch_finds_likeliest_whatever_the_seed(trained, said):
    model = load_model(trained[0])
    assert isinstance(model, Decoder)
    assert not model.training
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
    held_out = read_corpus(Config.of(TREE, {"data": {"path": text}}).data).held_out
    assert (found["step"], found["bytes"]) == (4, len(held_out))
    figures = f"{found['bits_per_byte']:.3f} bits per byte"
    assert text_of(said[1]["eval"]).startswith(figures)
    assert f"held-out  {figures}" in told


def test_eval_of_another_text_scores_all_of_it_as_plain_pytorch_does(trained, said):
    found, model = json.loads(text_of(said[1]["other"])), load_model(trained[0])
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


def test_an_exported_file_is_the_plain_modules_state_and_stays(trained, said):
    folder, answers = said
    assert answers["pt"] == (0, "", f"{trained[0]}/checkpoints/step-00000004 is exported to model.pt\n")
    there = "sherd export: model.pt is there already, and nothing is overwritten; choose another name\n"
    assert answers["again"] == (2, "", there)
    state = torch.load(folder / "model.pt", weights_only=True)
    plain = Decoder(Config.of(TREE, {"model": MODEL}).model)
    plain.load_state_dict(state)
    assert_same(whole_params(plain), whole_params(load_model(trained[0])))
    safetensors = pytest.importorskip("safetensors.torch")
    assert answers["safetensors"][0] == 0
    assert_same(safetensors.load_file(folder / "model.safetensors"), dict(state))
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]


def test_the_guides_lines_of_python_read_what_was_exported_and_what_was_not(trained, said, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs/do/train.md").read_text()
    blocks = re.findall(r"^    (?:import torch|from sherd)[^$]*?(?=^\S)", guide, re.M)
    assert len(blocks) == 2
    lines = textwrap.dedent("".join(blocks)).replace('"runs/1"', repr(str(trained[0])))
    lines = lines.replace("layers=4, width=128", ", ".join(f"{name}={value}" for name, value in MODEL.items()))
    monkeypatch.chdir(said[0])
    names = {}
    exec(lines, names)
    assert names["logits"].shape == (1, 5, 256)


def on_a_mesh(out, mesh):
    args = parse(["generate", out, "--mesh", mesh, "--length", "9", "--seed", "7"])
    ask = asked(args, pick(out, best=False))
    judged = asked(parse(["eval", out, "--mesh", mesh]), ask.checkpoint)
    model = loaded(ask)
    return "".join(generate(model, ask, args)), score(model, judged)["bits_per_byte"]


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2", "cp=2"])
def test_ranks_that_share_a_model_write_and_judge_as_one_does(world, trained, said, mesh):
    for written, bits in world(2).run(on_a_mesh, str(trained[0]), mesh):
        assert written == said[1]["seed"][1]
        assert bits == pytest.approx(json.loads(said[1]["json"][1])["bits_per_byte"], rel=1e-5)


def as_rank(words):
    """The exit code of this rank, one of those that the command has started, and what it says to stdout and stderr."""
    with (
        mock.patch.dict(os.environ, LOCAL_RANK="0"),
        mock.patch.object(using, "group", contextlib.nullcontext),  # there is one
        mock.patch.object(using, "set_timeout"),  # which is that of the next tests too
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
    assert started == [(2, "sherd", words)]
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
        "sherd generate: 2 ranks on a machine of 1 xpu device; start one per device, or set run.device = 'cpu'\n"
    )


REFUSED = [
    (["generate", "nowhere"], "nowhere is no folder; name a run's, as in runs/1, or a checkpoint's"),
    (["generate"], "there is no run under"),
    (["generate", "."], "holds no checkpoint; name a run's folder, or a checkpoint's"),
    (["generate", "RUN", "--length", "-1"], "--length: -1 is out of its limits; it must be at least 0"),
    (["generate", "RUN", "--length", "many"], "--length: invalid int value: 'many'"),
    (["generate", "RUN", "--temperature", "nan"], "--temperature: nan is out of its limits"),
    (["generate", "RUN", "--top-k", "0"], "--top-k: 0 is out of its limits"),
    (["generate", "RUN", "--num", "0"], "--num: 0 is out of its limits"),
    (["generate", "RUN", "--nproc", "0"], "--nproc: 0 is out of its limits"),
    (["generate", "RUN", "--mesh", "xp=2"], "names 'xp=2', which is no axis"),
    (["generate", "RUN", "--mesh", "tp=4"], "does not divide model.heads = 2"),
    (["generate", "RUN", "--mesh", "dp=2", "--nproc", "3"], "is for 2 ranks, but there are 3"),
    (["generate", "RUN", "--device", "tpu"], "run.device = 'tpu', but torch sees no tpu here"),
    (["generate", "RUN", "--lenght", "3"], "unknown option --lenght; did you mean --length?"),
    (["generate", "RUN/checkpoints/step-00000004", "--best"], "--best chooses among a run's checkpoints"),
    (["eval", "RUN", "--data", "absent"], "cannot read the text absent"),
    (["eval", "RUN", "--data", "empty"], "empty holds no text"),
    (
        ["export", "RUN", "model"],
        "model ends in no known form; choose a name that ends in .pt or in .safetensors, or say",
    ),
    (["export", "RUN", "model", "--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
    (["export", "RUN", "a", "b"], "'b' is one word too many"),
    (["export", "RUN", "absent/model.pt"], "absent is no folder"),
    (["export", "RUN", "empty"], "empty is there already, and nothing is overwritten"),
]


def test_what_cannot_be_used_is_refused_in_one_line(refused, trained, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, told in REFUSED:
        assert told in refused(*[word.replace("RUN", str(trained[0])) for word in words]), words


def test_a_damaged_run_a_changed_text_and_experts_for_transformers_are_refused(refused, tmp_path):
    path = put(tmp_path / "run", 3, config=Config.of({"data": {"path": "text.txt"}}).tree())
    assert "no longer holds the text that run/checkpoints/step-00000003 was trained on" in refused("eval", "run")
    break_it(path, "short file")
    torn = f"run/checkpoints/step-00000003/{DATA} has 2 of 76 bytes"
    assert f"run/checkpoints holds no whole checkpoint: {torn}" in refused("generate", "run")
    assert f"{path}/{DATA} has 2 of 76 bytes" in refused("generate", path)
    put(tmp_path / "mixed", 3, config=Config.of({"model": {"experts": 4}}).tree())
    mixed = "transformers has no model like sherd train's mixture of experts"
    assert mixed in refused("export", "mixed", "x", "--to", "hf")


# Hugging Face


def train_and_use(folder, config, *words):
    """A run into the folder `run`, then these commands: one process, for transformers takes seconds to load."""
    os.chdir(folder)
    with using.alone():
        write_report(config, Path("run"))
    return commands(folder, *words)


@pytest.fixture(scope="module")
def byte_lm(text, tmp_path_factory):
    """The folder of a run of a Hugging Face model, the path of its config, and what commands said about it."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    path, out = hf_config(folder, tie_word_embeddings=True, num_hidden_layers=1), folder / "run"
    out.mkdir()
    config = Config.of(TREE, {"model": {"hf": path}, "data": {"path": text}, "run": {**RUN, "steps": 2}})
    words = [
        *(["generate", out], ["eval", out, "--json"], ["export", out, "folder"], ["export", out, "model.pt"]),
        *(["export", out, "model.safetensors"], ["export", out, "--to", "sherd", "small"]),
    ]
    answers = answer_of(train_and_use, folder, config, *words)
    assert [code for code, _, _ in answers] == [0] * len(words), answers
    return folder, path, answers


def test_a_hugging_face_model_writes_is_judged_as_the_run_did_and_needs_no_optimizer_for_it(byte_lm):
    folder, _, answers = byte_lm
    out = folder / "run"
    assert answers[2][2] == f"{out}/checkpoints/step-00000002 is exported to folder\n"
    assert answers[0][1][:-1] == (out / "sample.txt").read_text()
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(answers[1][1])["bits_per_byte"] == pytest.approx(last["bits"], rel=1e-6)
    assert_same(whole_params(load_model(folder / "small")), whole_params(load_model(out)))
    sizes = [Folder(Disk(each)).newest()[0].manifest.nbytes for each in (folder / "small", out / "checkpoints")]
    assert sizes[0] < 0.4 * sizes[1]


def test_transformers_reads_what_its_model_is_exported_to_in_one_file_or_several(byte_lm, monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    folder, path, _ = byte_lm
    monkeypatch.setattr("sherd.train.hugging_face.LARGEST_FILE", "20KB")
    checkpoint = pick(str(folder / "run"), best=False)
    export(checkpoint, Config.of(checkpoint.config), tmp_path / "split", "hf")
    files = list((tmp_path / "split").glob("model-*.safetensors"))
    (tmp_path / "usual").touch()
    assert {each.stat().st_mode for each in files} == {(tmp_path / "usual").stat().st_mode}
    assert len(files) > 1
    tokens = torch.arange(14).view(2, 7)
    expected = load_model(folder / "run")(tokens)
    for exported in (folder / "folder", tmp_path / "split"):
        read = transformers.AutoModelForCausalLM.from_pretrained(exported)
        assert_same(read(tokens).logits, expected, exported.name)
    for state in (torch.load(folder / "model.pt"), safetensors.load_file(folder / "model.safetensors")):
        own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        own.load_state_dict(state)
        assert_same(own.eval()(tokens).logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_built_in_decoder_is_exported_as_the_llama_that_computes_the_same(world, text, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    run = tmp_path / "run"
    run.mkdir()
    model = {**TREE["model"], "heads": 4, "kv_heads": 2, "tied": tied, "rope_base": 50.0}
    world(2).run(write_report, Config.of(TREE, {"model": model, "data": {"path": text}, "run": RUN}), run)
    ((code, _, err),) = answer_of(commands, tmp_path, ["export", run / "checkpoints", "--to", "hf", "llama"])
    said = err.splitlines()[-1]  # behind what transformers and torchao say when they are imported
    assert (code, said) == (0, f"{run}/checkpoints/step-00000004 is exported to llama")
    names = {path.name for path in (tmp_path / "llama").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert type(read).__name__ == "LlamaForCausalLM"
    prompt = "the naïve\tÄ 日"
    (tokens,) = tokenizer([prompt])["input_ids"]
    assert tokens == list(b"\0" + prompt.encode())
    assert tokenizer.decode(tokens[1:]) == prompt
    tokens = torch.tensor([tokens[:16]])
    torch.testing.assert_close(read(tokens).logits, load_model(run)(tokens), rtol=1e-5, atol=1e-6)


def test_a_damaged_checkpoint_is_exported_in_no_form_and_leaves_nothing(refused, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.safetensors"):
        file.write_bytes(bytes(byte ^ (at > 4000) for at, byte in enumerate(file.read_bytes())))
    before = sorted(tmp_path.rglob("*"))
    for form in FORMS:
        assert "is not what was written" in refused("export", "run", "--to", form, "there")
    assert "is not what was written" in refused("generate", "run", "--device", "cpu")
    assert sorted(tmp_path.rglob("*")) == before
