"""`sherd train` refuses in one line with exit code 2, overwrites nothing, and stops and goes on when told."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version

import pytest

import sherd
from sherd.cli import main as cli
from sherd.cli.words import configure, parse
from sherd.train.config import Config, read_tree, toml
from sherd.train.text import read_corpus
from tests.support.ranks import forked
from tests.support.ranks.forked import start
from tests.train.test_checkpoint import DATA, break_it, put
from tests.train.test_loop import TREE, run

pytestmark = pytest.mark.usefixtures("elsewhere")

TEXT = ("--data", "text.txt")
CHECK = [
    (["--data", "absent"], "cannot read the text absent: No such file"),
    (["--data", "empty"], "holds 0 bytes of text"),
    (["--config", "absent.toml"], "cannot read the config absent.toml"),
    ([*TEXT, "model.widht=3"], "unknown field model.widht; did you mean width?"),
    ([*TEXT, "width=wide"], "width = 'wide' has the wrong type"),
    ([*TEXT, "--nproc", "3"], "batch = 16 does not fit 3 ranks; the nearest that does is batch=15"),
    ([*TEXT, "--nproc", "0"], "argument --nproc: 0 is out of its limits; it must be at least 1"),
    ([*TEXT, "--nproc", "-1"], "argument --nproc: -1 is out of its limits"),
    ([*TEXT, "--mesh", "dp=2,xp=2"], "the mesh dp=2,xp=2 names 'xp=2', which is no axis"),
    ([*TEXT, "--mesh", "dp=2,tp=2", "--nproc", "2"], "the mesh dp=2,tp=2 is for 4 ranks, but there are 2"),
    (
        [*TEXT, "--mesh", "ep=2"],
        "names 'ep=2', which is no axis of sherd train; a program of your own has it",
    ),
    ([*TEXT, "--steps", "-5"], "argument --steps: -5 is out of its limits"),
    (
        [*TEXT, "--steps", "many"],
        "argument --steps: 'many' has the wrong type; it must be a whole number; see sherd",
    ),
    ([*TEXT, "--stpes", "5"], "unknown option --stpes; did you mean --steps? sherd train --help lists all"),
    ([*TEXT, "--step", "3"], "unknown option --step; did you mean --steps?"),
    ([*TEXT, "--zzz"], "unknown option --zzz; sherd train --help lists all"),
    ([*TEXT, "--lr=0.1"], "unknown option --lr=0.1; did you mean lr=0.1?"),
    ([*TEXT, "--lr", "1"], "unknown option --lr; did you mean lr=VALUE?"),
    ([*TEXT, "--seed=9"], "unknown option --seed=9; did you mean seed=9?"),
    ([*TEXT, "optimizer.lr=0.1"], "unknown field optimizer.lr; did you mean lr?"),
    ([*TEXT, "--steps", "3", "layers=1", "--nproc", "2", "wrod"], "'wrod' is not an assignment"),
    ([*TEXT, "steps=1.5"], "steps = '1.5' has the wrong type; it must be a whole number"),
    ([*TEXT, "--trace", "x"], "argument --trace: 'x' has the wrong type; it must be a whole number"),
    ([*TEXT, "--trace", "0"], "argument --trace: 0 is out of its limits; it must be at least 1"),
    ([*TEXT, "--trace", "9", "--steps", "4"], "--trace 9, but the run begins with step 1 and ends with step 4"),
    (["--data", os.devnull], f"{os.devnull} is neither a file nor a folder"),
    (["--data", "fifo"], "fifo is neither a file nor a folder"),
    (["--data", "nothing.txt"], "nothing.txt holds 0 bytes of text in 0 documents"),
    (["--data", "one.txt"], "one.txt holds 1 bytes of text in 1 documents, which leaves 0 held-out bytes"),
    ([*TEXT, "--config", "sections.toml"], "unknown field model; a config has no sections"),
    ([*TEXT, "absent.toml"], "cannot read the config absent.toml"),
    ([*TEXT, "--config", "run.yaml"], "the config run.yaml is YAML; give TOML, or JSON in a file that ends in .json"),
    ([*TEXT, "strategy=hfsdp"], "strategy = 'hfsdp' is for two axes, but the mesh dp=2 has no replicate"),
    ([*TEXT, "cuda_graph=true", "device=cpu"], "cuda_graph = true needs CUDA, and this run is on cpu; leave it out"),
    ([*TEXT, "steps"], "'steps' is not an assignment"),
    ([*TEXT, "--out", "text.txt"], "text.txt is not an empty folder"),
    ([*TEXT, "--resume", "--config", "odd.json"], "unknown field run"),
    ([*TEXT, "--resume"], "there is no run under"),
    (
        [*TEXT, "--resume", "--out", "absent"],
        "absent/checkpoints holds no checkpoint; --resume-or-start starts a new run",
    ),
]


def test_bad_input_is_refused_in_one_line_before_any_rank_starts(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.json").write_text('{"run": 3}')
    (tmp_path / "sections.toml").write_text("[model]\nlayers = 3\n")
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "one.txt").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    for words, said in CHECK:
        assert said in refused("train", *words), words
    assert not (tmp_path / "runs").exists()


def test_no_command_or_none_that_there_is_is_refused_too(capsys):
    for words, said in (
        ([], "sherd: which command? sherd train trains a model; sherd --help says more"),
        (["trian"], "sherd: unknown command trian; did you mean train?"),
        (["layers=1"], "sherd: unknown command layers=1; sherd --help lists all"),
        (["--resume"], "sherd: which command? sherd train trains a model"),
    ):
        assert cli.main(words) == 2, words
        err = capsys.readouterr().err
        assert err.startswith(said), words
        assert err.count("\n") == 1, words


WITHOUT_TORCH = """
import sys
from sherd.cli.main import main
assert main(['train', '--data', 'absent']) == main(['generate', 'absent']) == 2
try: main(['--version'])
except SystemExit as left: sys.exit(left.code or 'torch' in sys.modules)
"""


def test_a_refusal_loads_no_torch():
    """Nor do versions, which are said."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, timeout=60, text=True)
    assert done.stdout.startswith(f"sherd {sherd.__version__}, torch {version('torch')}, Python 3.")


def test_fields_and_options_stand_in_any_order_and_go_before_the_config_file(tmp_path):
    args = parse(["train", "--nproc", "2", "lr=1e-3", "--steps", "1e3", "layers=1", "--data", "text.txt"])
    config = configure(args).config
    assert (args.nproc, config.lr, config.steps, config.layers) == (2, 1e-3, 1000, 1)
    config = configure(parse(["train", "steps=2e2", "--mesh", "dp=2"])).config
    assert (config.steps, config.mesh) == (200, "dp=2")
    traced = ((["--trace", "layers=1"], 0), (["layers=1", "--trace", "7"], 7), (["layers=1"], None))
    for words, step in traced:
        start = configure(parse(["train", *words]))
        assert (start.trace, start.config.layers) == (step, 1)
    (tmp_path / "run.toml").write_text('steps = 5\nseed = 6\ndata = "text.txt"\n')
    for words in (["run.toml", "--steps", "7"], ["--config", "run.toml", "steps=7"]):
        config = configure(parse(["train", *words, "every=3"])).config
        assert (config.steps, config.seed, config.every, config.data) == (7, 6, 3, "text.txt")


def test_a_config_that_is_printed_is_read_again_and_help_names_the_fields(capsys, tmp_path):
    assert cli.main(["train", "--print-config", "layers=7"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert configure(parse(["train", "printed.toml"])).config == Config(layers=7)
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--help"])
    assert left.value.code == 0
    assert "learning rate" in capsys.readouterr().out


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["train", "--what"]) == 2
    assert capsys.readouterr().err == ""


def test_rank_alone_which_some_schedulers_set_for_a_whole_pod_makes_no_rank_of_a_launcher(started, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", *TEXT, "device=cpu"]) == 0
    assert len(started) == 1
    assert cli.main(["train", *TEXT, "--print-config"]) == 0
    assert "lr = 0.002" in capsys.readouterr().out


def test_two_processes_are_the_default_and_said_if_not_quiet(started, capsys):
    for quiet, said in (([], "starting 2 ranks ...\n"), (["--quiet"], "")):
        words = ["train", *TEXT, "device=cpu", *quiet]
        assert cli.main(words) == 0
        assert capsys.readouterr().out == said
        assert started[-1] == (2, words)


def test_the_number_of_ranks_is_the_words_the_meshs_or_the_default(started):
    cli.main(["train", *TEXT, "--nproc", "1"])
    cli.main(["train", *TEXT, "--mesh", "dp=2,tp=2"])
    assert [num_ranks for num_ranks, _ in started] == [1, 4]


def test_a_folder_that_holds_anything_is_not_written_to(refused, tmp_path):
    put(tmp_path / "run", 3)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert "--resume goes on with the run in it" in refused("train", *TEXT, "--out", "run")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_resuming_takes_the_config_of_the_run_or_the_last_numbered_one_changed_by_the_words(tmp_path):
    put(tmp_path / "run", 3, config=Config.of(TREE).tree())
    start = configure(parse(["train", "--resume", "--out", "run", "lr=0.5"]))
    assert (start.resumed.step, start.out, start.config.lr, start.config.width) == (3, "run", 0.5, TREE["width"])
    for number in (2, 10, 9):
        put(tmp_path / "runs" / str(number), number)
    start = configure(parse(["train", "--resume"]))
    assert (start.resumed.step, start.out) == (10, "runs/10")


def test_a_checkpoint_of_another_model_or_text_past_the_steps_or_half_written_is_refused(refused, tmp_path):
    path = put(tmp_path / "run", 3)
    words = ("train", *TEXT, "--out", "run", "--resume")
    assert "is a checkpoint of another model, with width: 128 -> 64" in refused(*words, "width=64")
    assert "was trained on another text than text.txt holds now" in refused(*words)
    break_it(path, "missing file")
    assert f"{DATA} cannot be read: No such file" in refused(*words)
    put(tmp_path / "run", 36, config=Config.of(TREE).tree())
    past = "steps = 5, but run is past that: step 36 is saved; give more --steps"
    assert past in refused(*words, "--steps", "5")


def test_a_run_is_gone_on_with_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "llama.json").write_text("{}")
    config = Config.of(TREE, {"data": "text.txt", "hf": "llama.json"}).from_anywhere()
    put(tmp_path / "run", 3, config=config.tree())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gone_on = configure(parse(["train", "--resume", "--out", "../run"])).config
    assert (gone_on.data, gone_on.hf) == (str(tmp_path / "text.txt"), str(tmp_path / "llama.json"))
    configure(parse(["train", "--resume", "--out", "../run", "hf=../llama.json"]))


def test_a_run_goes_on_with_its_micro_batch_or_without(refused, started, tmp_path):
    saved = {name: value for name, value in Config(micro_batch=8).tree().items() if name != "compile"}  # a later field
    put(tmp_path / "run", 3, config=saved, text=read_corpus("text.txt", 128).digest)
    words = ["train", *TEXT, "--out", "run", "--resume", "--quiet", "--nproc"]
    assert cli.main([*words, "2"]) == 0
    assert "set micro_batch=0, which finds one that fits" in refused(*words, "4")
    assert cli.main([*words, "4", "micro_batch=0"]) == 0
    assert [num_ranks for num_ranks, _ in started] == [2, 4]


def losses(out):
    metrics = out / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def test_a_run_stopped_by_sigterm_is_saved_and_goes_on_with_the_losses_of_one_never_stopped(world, tmp_path):
    config = Config.of(TREE, {"data": str(tmp_path / "text.txt"), "steps": 150, "every": 0})
    (tmp_path / "run.toml").write_text(toml(config))
    words = ["train", "run.toml", "--out", "run"]
    process = start(forked.sherd, words, {}, folder=tmp_path, output=tmp_path / "said")
    while not losses(tmp_path / "run") and process.is_alive():
        time.sleep(0.02)
    process.terminate()
    process.join()
    out, err = (tmp_path / "said").read_text(), (tmp_path / "said.err").read_text()
    assert process.exitcode == 143
    assert err == "" or "coverage" in sys.modules, err  # which complains there of a process that a signal has ended
    first = losses(tmp_path / "run")
    assert f"stopped after step {max(first)}, which is saved" in out
    assert Config.of(read_tree(str(tmp_path / "run" / "config.toml"))) == config

    upto = max(first) + 2
    rest, _, _ = world(2).run(run, config, tmp_path / "run", resume=True, stop_after=upto)[0]
    never_stopped, _, _ = world(2).run(run, config, tmp_path / "whole", stop_after=upto)[0]
    assert {**first, **rest} == never_stopped
    assert list(never_stopped) == list(range(1, upto + 1))
