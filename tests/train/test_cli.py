"""`sherd train` refuses in one line with exit code 2, overwrites nothing, and stops and goes on when told."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version

import pytest

import sherd
from sherd.cli import main as cli
from sherd.cli.words import configure, parse
from sherd.train.config import Config, DataConfig, read_tree
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
    ([*TEXT, "model.widht=3"], "unknown field model.widht; did you mean model.width?"),
    ([*TEXT, "model.width=wide"], "model.width = 'wide' has the wrong type"),
    ([*TEXT, "--nproc", "3"], "optimizer.batch = 16 does not fit 3 ranks; the nearest that does is optimizer.batch=15"),
    ([*TEXT, "--nproc", "0"], "--nproc 0 is too few"),
    ([*TEXT, "--nproc", "-1"], "--nproc -1 is too few"),
    ([*TEXT, "--nproc", "2", "run.ranks=4"], "run.ranks = 4, but there are 2 ranks"),
    ([*TEXT, "--mesh", "dp=2,xp=2"], "the mesh dp=2,xp=2 names 'xp=2', which is no axis"),
    ([*TEXT, "--mesh", "dp=2,tp=2", "--nproc", "2"], "the mesh dp=2,tp=2 is for 4 ranks, but there are 2"),
    ([*TEXT, "--mesh", "ep=2"], "ep=2, but the model has no experts"),
    ([*TEXT, "--steps", "-5"], "run.steps = -5 is out of its limits"),
    ([*TEXT, "--steps", "many"], "argument --steps: 'many' is no whole number; see sherd train --help"),
    ([*TEXT, "--stpes", "5"], "unknown option --stpes; did you mean --steps? sherd train --help lists all"),
    ([*TEXT, "--step", "3"], "unknown option --step; did you mean --steps?"),
    ([*TEXT, "--zzz"], "unknown option --zzz; sherd train --help lists all"),
    ([*TEXT, "--optimizer.lr=0.1"], "--optimizer.lr=0.1 is no option; write a field without dashes: optimizer.lr=0.1"),
    ([*TEXT, "--optimizer.lr", "1"], "--optimizer.lr is no option; write a field without dashes: optimizer.lr=VALUE"),
    ([*TEXT, "--save-every=9"], "unknown option --save-every=9; did you mean run.save_every=9?"),
    ([*TEXT, "lr=0.1"], "'lr=0.1' is not an assignment; write section.field=value, did you mean optimizer.lr=0.1?"),
    ([*TEXT, "--steps", "3", "model.layers=1", "--nproc", "2", "wrod"], "'wrod' is not an assignment"),
    ([*TEXT, "run.steps=1.5"], "run.steps = '1.5' has the wrong type; it must be a whole number"),
    ([*TEXT, "--trace", "x"], "argument --trace: 'x' is no whole number"),
    ([*TEXT, "--trace", "1", "run.memory_limit=1"], "--trace and run.memory_limit both follow all tensors"),
    ([*TEXT, "--trace", "0"], "argument --trace: '0' is no step; the first is 1"),
    ([*TEXT, "--trace", "9", "--steps", "4"], "--trace 9, but the run begins with step 1 and ends with step 4"),
    (["--data", os.devnull], f"{os.devnull} is neither a file nor a folder"),
    (["--data", "fifo"], "fifo is neither a file nor a folder"),
    (["--data", "nothing.txt"], "nothing.txt holds 0 bytes of text in 0 documents"),
    (["--data", "one.txt"], "one.txt holds 1 byte of text in 1 document, which leaves 2 training bytes"),
    ([*TEXT, "--config", "flat.toml"], "layers = 3 stands outside a section; put it under [model]"),
    ([*TEXT, "--config", "run.yaml"], "the config run.yaml is YAML; give TOML, or JSON in a file that ends in .json"),
    ([*TEXT, "shard.strategy=hfsdp"], "shard.strategy = 'hfsdp' is for two axes, but the mesh dp=2 has no replicate"),
    ([*TEXT, "steps"], "'steps' is not an assignment"),
    ([*TEXT, "--out", "text.txt"], "text.txt is not an empty folder"),
    ([*TEXT, "--out", "text.txt/run"], "cannot write to text.txt/run: Not a directory"),
    ([*TEXT, "--resume", "--config", "odd.json"], "run = 3 stands outside a section"),
    ([*TEXT, "--resume"], "there is no run under"),
    ([*TEXT, "--resume", "--out", "absent"], "absent holds no checkpoint to resume from"),
]


def test_bad_input_is_refused_in_one_line_before_any_rank_starts(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.json").write_text('{"run": 3}')
    (tmp_path / "flat.toml").write_text("layers = 3\n")
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
        (["model.layers=1"], "sherd: unknown command model.layers=1; sherd --help lists all"),
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
    args = parse(
        ["train", "--nproc", "2", "optimizer.lr=1e-3", "--steps", "1e3", "model.layers=1", "--data", "text.txt"]
    )
    config, _ = configure(args)
    assert (args.nproc, config.optimizer.lr, config.run.steps, config.model.layers) == (2, 1e-3, 1000, 1)
    config, _ = configure(parse(["train", "run.steps=2e2", "--mesh", "dp=2"]))
    assert (config.run.steps, config.run.mesh) == (200, "dp=2")
    traced = ((["--trace", "model.layers=1"], 0), (["model.layers=1", "--trace", "7"], 7), (["model.layers=1"], None))
    for words, step in traced:
        args = parse(["train", *words])
        assert (args.trace, configure(args)[0].model.layers) == (step, 1)
    (tmp_path / "run.toml").write_text('[run]\nsteps = 5\nseed = 6\n[data]\npath = "text.txt"\n')
    config, _ = configure(parse(["train", "--config", "run.toml", "--steps", "7", "run.keep=3"]))
    assert (config.run.steps, config.run.seed, config.run.keep, config.data.path) == (7, 6, 3, "text.txt")


def test_a_config_that_is_printed_is_read_again_and_help_names_the_fields(capsys, tmp_path):
    assert cli.main(["train", "--print-config", "model.layers=7", "run.out=somewhere"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    config, _ = configure(parse(["train", "--config", "printed.toml"]))
    assert config == Config.of({"model": {"layers": 7}})
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
    assert cli.main(["train", *TEXT, "run.device=cpu"]) == 0
    assert len(started) == 1
    assert cli.main(["train", *TEXT, "--print-config"]) == 0
    assert "[optimizer]" in capsys.readouterr().out


def test_two_processes_and_a_new_numbered_folder_are_the_default_and_said_if_not_quiet(started, capsys, tmp_path):
    for number, quiet, said in (("1", [], "starting 2 ranks ...\n"), ("2", ["--quiet"], "")):
        words = ["train", *TEXT, "run.device=cpu", *quiet]
        assert cli.main(words) == 0
        assert capsys.readouterr().out == said
        assert started[-1] == (2, [*words, "--out", f"runs/{number}"])
        assert (tmp_path / "runs" / number).is_dir()


def test_the_number_of_ranks_is_the_words_the_configs_or_the_default(started):
    cli.main(["train", *TEXT, "--nproc", "1"])
    cli.main(["train", *TEXT, "run.ranks=4"])
    cli.main(["train", *TEXT, "--mesh", "dp=2,cp=2"])
    assert [num_ranks for num_ranks, _ in started] == [1, 4, 4]


def test_a_folder_that_holds_anything_is_not_written_to(refused, tmp_path):
    put(tmp_path / "run", 3)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert "--resume goes on with the run in it" in refused("train", *TEXT, "--out", "run")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_resuming_takes_the_config_of_the_run_or_the_last_numbered_one_changed_by_the_words_but_not_its_ranks(tmp_path):
    put(tmp_path / "run", 3, config=Config.of(TREE, {"run": {"ranks": 4}}).tree())
    config, resumed = configure(parse(["train", "--resume", "--out", "run", "optimizer.lr=0.5"]))
    assert (resumed.step, config.run.ranks, config.optimizer.lr) == (3, 0, 0.5)
    assert config.model == Config.of(TREE).model
    for number in (2, 10, 9):
        put(tmp_path / "runs" / str(number), number)
    config, resumed = configure(parse(["train", "--resume"]))
    assert (resumed.step, config.run.out) == (10, "runs/10")


def test_a_checkpoint_of_another_model_or_text_past_the_steps_or_half_written_is_refused(refused, tmp_path):
    path = put(tmp_path / "run", 3)
    words = ("train", *TEXT, "--out", "run", "--resume")
    assert "is a checkpoint of another model: model.width" in refused(*words, "model.width=64")
    assert "was trained on another text than text.txt holds now" in refused(*words)
    break_it(path, "missing file")
    assert f"{DATA} cannot be read: No such file" in refused(*words)
    put(tmp_path / "run", 36, config=Config.of(TREE).tree())
    past = "run.steps = 5, but run is past that: step 36 is saved; give more --steps"
    assert past in refused(*words, "--steps", "5")


def test_a_run_is_gone_on_with_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "llama.json").write_text("{}")
    config = Config.of(TREE, {"data": {"path": "text.txt"}, "model": {"hf": "llama.json"}}).from_anywhere()
    put(tmp_path / "run", 3, config=config.tree())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gone_on, _ = configure(parse(["train", "--resume", "--out", "../run"]))
    assert (gone_on.data.path, gone_on.model.hf) == (str(tmp_path / "text.txt"), str(tmp_path / "llama.json"))
    configure(parse(["train", "--resume", "--out", "../run", "model.hf=../llama.json"]))


def test_a_run_of_an_older_version_goes_on_with_its_micro_batch_or_without(refused, started, tmp_path):
    saved = Config.of({"optimizer": {"micro_batch": 8}}).tree()
    del saved["shard"], saved["optimizer"]["flatten"], saved["run"]["compile"]
    digest = read_corpus(DataConfig(path="text.txt")).digest
    put(tmp_path / "run", 3, config=saved, text=digest)
    words = ["train", *TEXT, "--out", "run", "--resume", "--quiet", "--nproc"]
    assert cli.main([*words, "2"]) == 0
    assert "set optimizer.micro_batch=0, which finds one that fits" in refused(*words, "4")
    assert cli.main([*words, "4", "optimizer.micro_batch=0"]) == 0
    assert [num_ranks for num_ranks, _ in started] == [2, 4]


def losses(out):
    metrics = out / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def test_a_run_stopped_by_sigterm_is_saved_and_goes_on_with_the_losses_of_one_never_stopped(world, tmp_path):
    tree = {**TREE, "data": {**TREE["data"], "path": str(tmp_path / "text.txt")}}
    tree["run"] = {**TREE["run"], "steps": 150, "save_every": 0}
    (tmp_path / "run.json").write_text(json.dumps(tree))
    words = ["train", "--config", "run.json", "--out", "run"]
    process = start(forked.sherd, words, {}, folder=tmp_path, output=tmp_path / "said")
    while not losses(tmp_path / "run") and process.is_alive():
        time.sleep(0.02)
    process.terminate()
    process.join()
    out, err = (tmp_path / "said").read_text(), (tmp_path / "said.err").read_text()
    err = re.sub(r"sherd train: waiting for ranks .*\n", "", err)  # on a busy machine
    assert process.exitcode == 143
    assert err == "" or "coverage" in sys.modules, err  # which complains there of a process that a signal has ended
    first = losses(tmp_path / "run")
    assert f"stopped after step {max(first)}, which is saved" in out
    assert Config.of(read_tree(str(tmp_path / "run" / "config.toml"))) == Config.of(tree)

    upto, config = max(first) + 2, Config.of(tree)
    rest, _, _ = world(2).run(run, config, tmp_path / "run", resume=True, stop_after=upto)[0]
    never_stopped, _, _ = world(2).run(run, config, tmp_path / "whole", stop_after=upto)[0]
    assert {**first, **rest} == never_stopped
    assert list(never_stopped) == list(range(1, upto + 1))


def command(words):
    """`sherd` with these words. The ranks that it starts are new Pythons."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    sys.exit(cli.main(words))


def ended(folder, words):
    """The exit code of `command` with these words, and what it said to stderr."""
    process = start(command, words, folder=folder, output=folder / "said")
    process.join()
    return process.exitcode, (folder / "said.err").read_text()


@pytest.mark.slow  # two runs of a model of some size, and a search for what fits
def test_a_run_out_of_memory_says_what_held_it_and_a_change_that_it_names_fits(tmp_path):
    words = ["train", *TEXT, "--nproc", "1", "--steps", "2", "--quiet", "run.eval_every=0", "run.memory_limit=0.03"]
    code, err = ended(tmp_path, [*words, "optimizer.micro_batch=8"])
    assert code == 1
    assert "Traceback" not in err
    assert "are alive when forward of blocks." in err
    assert "explained by sherd: what would fit, instead of 1 rank, " in err
    size = re.search(r"^  [\d,]+ micro-batch(?:es)? of (\d) samples?: saves ", err, re.MULTILINE)[1]
    (tmp_path / "said.err").unlink()
    assert ended(tmp_path, [*words, f"optimizer.micro_batch={size}"]) == (0, "")
