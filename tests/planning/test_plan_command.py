"""`sherd plan` prints what it finds, writes what runs, and refuses in one line."""

import itertools
import json
import re
import textwrap
from pathlib import Path

import pytest

from sherd.cli.main import main
from sherd.tools.plan.files import from_json
from sherd.tools.simulate.settings import UNITS
from sherd.train.config import Config, read_tree
from tests.planning.models import LLAMA
from tests.support.commands import refusal
from tests.test_examples import run

ROOT = Path(__file__).parents[2]
CONFIG = """
layers = 2
width = 64
tied = false
context = 32
batch = 8
steps = 2
precision = "fp32"
"""
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}  # of those that it would have by itself transformers warns
FACTORY = "from torch import nn\ndef make():\n    return nn.Linear(4, 4)\ndef fails():\n    raise ValueError('no')\n"
IMAGES = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)), (torch.zeros(4, 3, 8, 8),)
"""
BRINGS = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
def over_tp(model, tp):
    for block in model:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
def make():
    return nn.Sequential(Block(), Block()), torch.zeros(4, 8), lambda m, x: m(x).square().mean(), {"tp": over_tp}
"""
# All settings, so that nothing is searched.
FIXED = ["--checkpointing", "no", "--reshard", "yes", "--offload", "no", "--prefetch", "1", "--placement", "shard"]
FIXED += ["--wrapping", "auto", "--strategy", "auto", "--micro-batch", "1"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "gpt2.json").write_text(json.dumps(GPT2))
    (tmp_path / "tied.toml").write_text(CONFIG.replace("tied = false", ""))
    (tmp_path / "made.py").write_text(FACTORY)
    (tmp_path / "images.py").write_text(IMAGES)
    (tmp_path / "cluster.toml").write_text('name = "x"\ndevices_per_node = "8"\n')
    return tmp_path


def said(capsys, *words, code=0):
    """What `sherd plan` prints."""
    assert main(["plan", *map(str, words)]) == code
    return capsys.readouterr().out


def chosen(files, capsys, *words):
    """What is planned and printed for 2 ranks of a laptop, and the config that is written, with which training runs."""
    wanted = files / "chosen.toml"
    out = said(capsys, files / "train.toml", "--cluster", "laptop", *words, "--write", wanted)
    assert main(["train", "--config", str(wanted), "--dry-run", "--nproc", "2"]) == 0
    capsys.readouterr()
    return out, Config.of(read_tree(str(wanted)))


@pytest.mark.front("A plan before you pay")
def test_a_config_is_planned_and_what_is_written_runs(files, capsys):
    page, record = files / "p.html", files / "t.json"
    out, config = chosen(files, capsys, "--ranks", 2, "--report", page, "--timeline", record)
    assert out.startswith("train.toml: 2 x ")
    assert (config.batch, config.width) == (8, 64)
    assert from_json(record.read_text()).is_predicted
    assert "<h2>What is alive at the peak</h2>" in page.read_text()


def test_settings_are_written_as_they_are_planned(files, capsys):
    def written(*words):
        return chosen(files, capsys, "--mesh", "dp=2", *FIXED, *words)

    for wrapping in ("pairs", "parts", "ends"):
        out, config = written("--wrapping", wrapping, "--micro-batch", 2)
        assert UNITS[wrapping] in out
        assert config.wrapping == wrapping
    config = written("--checkpointing", 0.5)[1]
    assert (config.checkpointing, config.recompute) == (0.5, "full")
    config = written("--checkpointing", "yes", "--recompute", "selective")[1]
    assert (config.checkpointing, config.recompute) == (1.0, "selective")
    assert written("--context", 48)[1].context == 48


def planned(capsys, *words):
    return json.loads(said(capsys, *words, "--json"))


def test_a_hugging_face_config_is_planned_as_json(files, capsys):
    found = planned(capsys, files / "llama.json", "--mesh", "replicate=2,dp=4", "--checkpointing", "yes")
    assert found["fits"]
    assert found["settings"]["mesh"] == {"shard": 4, "replicate": 2, "pp": 1, "cp": 1, "tp": 1}
    assert found["settings"]["checkpointing"]
    assert sum(found["peak"]["by_kind"].values()) == found["peak"]["nbytes"] <= found["driver_bytes"]


def test_a_factory_brings_a_batch_of_its_own_without_tokens_with_a_price_of_samples(files, capsys):
    words = (f"{files}/images.py:make", "--ranks", 2)
    found = planned(capsys, *words)
    assert found["settings"]["micro_batch"] * found["settings"]["micro_batches"] == 4
    assert found["samples_per_second"] == pytest.approx(8 / found["step_seconds"])
    assert not found["settings"]["checkpointing"]
    assert found["cost_per_million_tokens"] is None
    assert found["cost_per_million_samples"] == pytest.approx(3.0 * 2 / 3600 / found["samples_per_second"] * 1e6)
    assert "USD per million samples" in said(capsys, *words)
    many = planned(capsys, *words, "--samples", 10**9)
    assert many["settings"]["micro_batches"] > 10**6
    assert many["samples_per_second"] * many["step_seconds"] == pytest.approx(1e9)


def test_more_tokens_than_a_model_that_turns_positions_is_for_are_noted(files, capsys):
    words = (files / "llama.json", "--mesh", "dp=1", *FIXED, "--context")
    note = "256 tokens in a sample are more than the 128 that the config says the model is for"
    assert said(capsys, *words, 256).endswith(f"\nnote        {note}\n")
    assert planned(capsys, *words, 256)["notes"] == [note]
    assert "note" not in said(capsys, *words, 128)


def program_in(out, folder, more):
    """The program at the end of a plan, with further lines before its last one, in a file."""
    program = textwrap.dedent(out.partition("\na program that trains so, for torchrun\n")[2])
    last = "dist.destroy_process_group()"
    (folder / "program.py").write_text(program.replace(last, f"{more}\n{last}"))
    return folder / "program.py"


def test_a_plan_of_another_model_ends_with_the_program_that_trains_so(files, capsys):
    words = ["--checkpointing", "0.5", "--recompute", "selective", "--mesh", "replicate=2,dp=1", "--samples", 4]
    words += ["--micro-batch", 1, "--reshard", "no", "--placement", "flat", "--cluster", "laptop", "--context", 8]
    words += ["--wrapping", "pairs"]
    out = said(capsys, files / "llama.json", *words)
    more = "print(type(model.model.layers[0].self_attn.q_proj.weight).__name__, mesh.mesh_dim_names)\n"
    more += "print([isinstance(each.forward, functools.partial) for each in model.model.layers])"
    first, _ = run(program_in(out, files, more), files / "said")
    *steps, weight, checkpointed = first.splitlines()
    losses = [float(each.split()[1]) for each in steps]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert weight == "RaggedDTensor ('replicate', 'dp')"
    assert checkpointed == str([False, True] * (LLAMA["num_hidden_layers"] // 2))
    assert "sherd.accumulate(model, 2)" in out
    assert "auto_units(" in out


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=1,tp=2", marks=pytest.mark.slow)])
def test_a_program_calls_the_factory_with_its_own_loss_and_layout(files, capsys, mesh):
    (files / "brings.py").write_text(BRINGS)
    out = said(capsys, f"{files}/brings.py:make", "--mesh", mesh, "--cluster", "laptop", "--precision", "fp32")
    first, _ = run(program_in(out, files, ""), files / "said")
    losses = [float(each.split()[1]) for each in first.splitlines()]
    assert losses[-1] < losses[0]
    assert ('cuts["tp"]' in out) == ("tp" in mesh)


def test_one_rank_with_offload_waits_for_copies_and_not_for_an_all_gather(files, capsys):
    words = [each if each != "no" or FIXED[at - 1] != "--offload" else "yes" for at, each in enumerate(FIXED)]
    waits = said(capsys, files / "llama.json", "--ranks", 1, *words).partition("\nwaits ")[2].splitlines()[0]
    assert "for copies to the device" in waits
    assert "all-gather" not in waits


def test_nodes_are_all_of_their_devices(files, capsys):
    assert said(capsys, files / "llama.json", "--nodes", 2, *FIXED).startswith("llama.json: 16 x NVIDIA H100")


def test_a_mesh_may_have_blanks_a_strategy_its_usual_names_and_lines_fit_a_terminal(files, capsys):
    out = said(capsys, files / "llama.json", "--mesh", "replicate = 2, dp=2", "--strategy", "ZeRO-3")
    assert "\nsettings    2 replicas x 2 ranks, all sharded, " in out
    out = said(capsys, files / "llama.json", "--mesh", "replicate=2", "--strategy", "shard_grad_op")
    assert "settings    2 ranks, zero2, " in out
    assert max(map(len, out.partition("\na program that trains so")[0].splitlines())) <= 100
    assert "0.00" not in out, "nothing takes no time longer"
    assert " 0 B " not in out


def test_what_does_not_fit_ends_with_1_and_a_file_that_cannot_be_written_is_told(files, capsys):
    assert "too much by" in said(capsys, files / "gpt2.json", "--limit", "1 MiB", *FIXED, code=1)
    assert main(["plan", str(files / "gpt2.json"), "--report", str(files / "none" / "p.html"), *FIXED]) != 0
    assert "No such file or directory" in capsys.readouterr().err


REFUSED = [
    (["nothing.json"], "sherd plan: nothing.json: not found\n"),
    (["nothing.py:make"], "sherd plan: nothing.py: not found\n"),
    (["nothing"], "nothing is no file; name a factory as package.module:function or "),
    (["llama.json", "--tokens", "many"], "'many': expected a number of tokens, as 300B or 1.4T"),
    (["images.py:make", "--tokens", "1T"], "samples of images.py:make have no tokens"),
    (["llama.json", "--samples", "8", "0"], "--samples: 0 is out of its limits; it must be at least 1"),
    (["made.py:fails"], "raised ValueError: no"),
    (["made.py:make"], "the model (Linear) does not run without values"),
    (["llama.json", "--cluster", "cluster.toml"], "cluster.toml: device.name is missing"),
    (["llama.json", "--limit", "80"], "expected bytes"),
    (["llama.json", "--nodes", "2", "--ranks", "8"], "--nodes 2: --ranks is there too"),
    (["llama.json", "--ranks", "0"], "--ranks: 0 is out of its limits; it must be at least 1"),
    (["llama.json", "--mesh", "dp=2,dp=2"], "the mesh dp=2,dp=2 names dp twice"),
    (
        ["llama.json", "--mesh", "xp=2"],
        "the mesh xp=2 names 'xp=2', which is no axis of sherd plan; write axis=ranks, of pp, ",
    ),
    (["llama.json", "--mesh", "dp=0"], "the mesh dp=0 gives dp '0' ranks; it must be a whole number of at least 1"),
    (["llama.json", "--mesh", "dp"], "the mesh dp gives dp '' ranks; it must be a whole number of at least 1"),
    (["llama.json", "--mesh", "dp=8", "--micro-batch", "3"], "--micro-batch 3: it does not divide the 1 sample of"),
    (["llama.json", "--micro-batch", "0"], "--micro-batch: 0 is out of its limits; it must be at least 1"),
    (["llama.json", "--prefetch", "-1"], "--prefetch: -1 is out of its limits; it must be at least 0"),
    (["llama.json", "--checkpointing", "maybe"], "'maybe' is neither yes, no, nor the share of blocks, 0 to 1"),
    (["llama.json", "--checkpointing", "no", "--recompute", "selective"], "--recompute selective: without checkp"),
    (["llama.json", "--strategy", "ddp", "--reshard", "yes"], "--reshard yes: by the strategy ddp parameters are"),
    (["llama.json", "--strategy", "ddp", "--offload", "yes"], "--strategy ddp: with offload all is sharded"),
    (
        ["llama.json", "--strategy", "zero4"],
        "'zero4' is out of its limits; it must be one of auto, zero3, fsdp, ",
    ),
    (["llama.json", "--strategy", "hsdp"], "--strategy hsdp: it has replicas; give a mesh with the axis replicate"),
    (["tied.toml", "--mesh", "dp=2", "--wrapping", "ends"], "wrapping"),
    (["train.toml", "--ranks", "3"], "batch 8: 3 ranks do not divide it"),
    (["made.py"], "made.py names no function in it; write made.py:FUNCTION"),
    (["images.py:make", "--context", "8"], "--context 8: samples of images.py:make have no tokens to number"),
    (["gpt2.json", "--context", "33"], "--context 33: gpt2.json has a table of 32 positions, and none for more"),
    (["llama.json", "--mesh", "pp=2"], "--mesh pp=2: no layout says how this model is laid over pp"),
    (["llama.json", "--mesh", "dp=2,ep=2"], "the mesh dp=2,ep=2 names 'ep=2', which is no axis of sherd plan; "),
    (["llama.json", "--mesh", "tp=3"], "does not divide the model's heads"),
    (["train.toml", "--mesh", "dp=2,tp=3"], "tp=3, which does not divide"),
    (["train.toml", "--mesh", "pp=2"], "--mesh pp=2: no layout says how this model is laid over pp"),
    (["llama.json", "--checkpointing", "2"], "or the share of blocks, 0 to 1"),
    (["llama.json", "--mesh", "dp=2", "--ranks", "4"], "has 2 ranks, and --ranks is 4"),
    (["llama.json", "--samples", "3"], "--samples 3: 8 ranks do not divide it"),
    (["llama.json", "--write", "x.toml"], "needs a MODEL that is a config of sherd train"),
    (["train.toml", "--write", "x.toml", "--optimizer", "sgd"], "--optimizer sgd: --write is for sherd train"),
    (["train.toml", "--write", "x.toml", "--prefetch", "2"], "--prefetch 2: --write is for sherd train, which has 1"),
    (["train.toml", "--context", "1"], "context = 1 is out of its limits"),
    (["llama.json", "--placement", "rows"], "invalid choice"),
    (["llama.json", "--wrapping", "all"], "invalid choice"),
    (["llama.json", "--recompute", "half"], "invalid choice"),
    (["made.py:make", "--wrapping", "pairs"], "the model (Linear) does not run without values"),
]


def test_what_cannot_be_planned_is_told_in_one_line(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    for words, says in REFUSED:
        assert says in refusal(capsys, "plan", *words), words


def test_a_run_is_planned_as_it_was_configured_and_so_compares_with_its_record(files, capsys):
    run = files / "run"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG + 'strategy = "zero2"\n')
    (run / "timeline.json").write_text("")
    for of in ([run], [run / "config.toml", "--as-configured"]):
        plan = json.loads(said(capsys, *of, "--cluster", "laptop", "--ranks", 2, "--json"))["settings"]
        assert (plan["strategy"], plan["placement"], plan["wrapping"], plan["micro_batch"]) == (
            "zero2",
            "shard",
            "auto",
            4,
        )
    for name, cluster in (("one", "laptop"), ("other", "laptop")):
        words = ["--wrapping", "pairs"] if name == "other" else []
        said(capsys, run, "--cluster", cluster, "--ranks", 2, *words, "--timeline", files / name)
    assert "sherd plan RUN --timeline FILE" in refusal(capsys, "compare", files / "one", files / "other")
    (run / "config.toml").write_text(CONFIG + 'strategy = "hfsdp"\nmesh = "replicate=2,dp=2"\n')
    assert "strategy = hfsdp is not planned" in refusal(capsys, "plan", run, "--ranks", 4)


def test_muon_is_planned_by_its_name_or_a_config_with_half_of_the_state_and_may_be_written(files, capsys):
    words = files / "train.toml", "--cluster", "laptop", "--mesh", "dp=2", *FIXED, "--micro-batch", 4
    written = files / "muon.toml"
    out = said(capsys, *words, "--optimizer", "muon", "--write", written)
    assert "of what travels in it is hidden" in out
    assert Config.of(read_tree(str(written))).optimizer == "muon"
    by_config, adamw, muon = (
        json.loads(said(capsys, *of, *words[1:], "--json"))
        for of in ([written], [words[0]], [words[0], "--optimizer", "muon"])
    )
    assert by_config["peak"] == muon["peak"]
    assert muon["peak"]["by_kind"]["optimizer state"] < 0.6 * adamw["peak"]["by_kind"]["optimizer state"]
    assert "sent_bytes" in muon
    assert sum(muon["sent_bytes"].values()) > sum(adamw["sent_bytes"].values())


def test_a_strategy_that_shards_is_given_a_mesh_that_shards_and_replicas_alone_are_not_called_sharded(files, capsys):
    words = files / "train.toml", "--cluster", "laptop", "--ranks", 2
    assert json.loads(said(capsys, *words, "--strategy", "zero3", "--json"))["settings"]["mesh"]["shard"] == 2
    replicas = said(capsys, *words, "--mesh", "replicate=2", "--strategy", "zero3")
    assert "2 replicas, not sharded" in replicas


def test_a_plan_says_what_it_is_a_plan_of(files, capsys):
    page = files / "p.html"
    out = said(capsys, files / "llama.json", "--ranks", 16, "--context", 32, "--samples", 32, "--report", page)
    for words in ("on 2 nodes", "32 samples of 32 tokens in a step, bf16, adamw-fused"):
        assert words in out
        assert words in page.read_text()


COLUMNS = ["tokens/s", "MFU", "per million tokens", "days", "price", "memory"]


def test_several_clusters_and_batches_are_one_table_the_cheapest_first_with_days_and_prices(files, capsys):
    clusters, samples = ["h100", "mi300x", "laptop"], [16, 32]
    words = [files / "llama.json", "--cluster", *clusters, "--samples", *samples, *FIXED, "--tokens", "1.4T"]
    plans = planned(capsys, *words)["plans"]
    assert {(each["cluster"], each["samples"]) for each in plans} == {*itertools.product(clusters, samples)}
    costs = [each["cost_per_million_tokens"] for each in plans]
    assert costs == [*sorted(costs[:4]), None, None]
    for each in plans[:4]:
        assert each["price"] == pytest.approx(1.4e6 * each["cost_per_million_tokens"])
        assert each["days"] == pytest.approx(1.4e12 / each["tokens_per_second"] / 86400)
    out = said(capsys, *words)
    head, *rows = out.partition("\n\n")[0].splitlines()
    assert re.split(" {2,}", head) == ["cluster", "ranks", "samples", "step", *COLUMNS]
    assert [row.split()[0] for row in rows] == [each["cluster"] for each in plans]
    assert [row.endswith("fits") for row in rows] == [True] * 6
    assert f"\nllama.json: 8 x {'AMD' if plans[0]['cluster'] == 'mi300x' else 'NVIDIA'}" in out
    assert "\nrun         1,400,000,000,000 tokens in " in out


def test_the_answer_is_fits_tight_or_does_not_fit_in_text_json_and_on_the_page(files, capsys):
    words = [files / "llama.json", "--cluster", "a100", "--ranks", 8, *FIXED]
    taken = planned(capsys, *words)["driver_bytes"]
    page = files / "p.html"
    for share, answer, code in ((0.8, "fits", 0), (0.99, "tight", 0), (1.01, "does not fit", 1)):
        given = [*words, "--limit", f"{taken / share:.0f} B"]
        out = said(capsys, *given, "--report", page, code=code)
        assert f": {answer}" in out
        assert "published A100 trainings took 6 to 13% more than planned" in " ".join(out.split())
        found = json.loads(said(capsys, *given, "--json", code=code))
        assert (found["answer"], found["fits"]) == (answer, code == 0)
        assert found["published"] == {"devices": "A100", "low": 0.062, "high": 0.131, "num": 4}
        assert f"{answer}" in page.read_text()
        assert '"text":"reserved, with the driver ' in page.read_text()


def test_host_memory_is_counted_and_refused_above_that_of_the_cluster(files, capsys):
    words = ["yes" if FIXED[at - 1] == "--offload" else each for at, each in enumerate(FIXED)] + ["--mesh", "dp=8"]
    found = planned(capsys, files / "llama.json", *words)
    assert found["host_limit_bytes"] == 2 * 10**12
    kept = planned(capsys, files / "llama.json", *FIXED, "--mesh", "dp=8")
    assert kept["host_bytes"] == 0
    of_device = sum(kept["peak"]["by_kind"][kind] for kind in ("shards", "optimizer state"))
    assert found["host_bytes"] > 8 * of_device
    text = (ROOT / "sherd/tools/simulate/clusters/h100.toml").read_text()
    for given, says, code in ((found["host_bytes"], "fits", 0), (found["host_bytes"] - 1, "does not fit", 1)):
        (files / "small.toml").write_text(text.replace('"2 TB"', f'"{given} B"'))
        small = [files / "llama.json", "--cluster", files / "small.toml", *words]
        out = said(capsys, *small, code=code)
        assert "\nhost memory " in out
        assert ("host memory" in out and ": does not fit" in out) == bool(code)
        assert json.loads(said(capsys, *small, "--json", code=code))["answer"] == says
