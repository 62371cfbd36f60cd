"""Does `sherd train` refuse in one line with exit code 2, overwrite nothing, and stop and go on when told?"""

import json
import os
import subprocess
import sys
import time

import pytest

from sherd.train import cli, launch
from sherd.train.config import Config
from sherd.train.words import configure, parse
from tests.forked import start
from tests.train.test_checkpoint import break_it, put
from tests.train.test_loop import TREE, run


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch, tmp_path):
    """Away from any run, and with nothing started: a refusal comes before the first rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "text.txt").write_text("some words, and some more of them. " * 500)


@pytest.fixture
def started(monkeypatch):
    """What would have been started: (number of ranks, words)."""
    calls = []
    monkeypatch.setattr(launch, "start", lambda num_ranks, module, words: calls.append((num_ranks, words)) or 0)
    return calls


def refused(capsys, *words):
    assert cli.main(["train", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sherd train: ")
    assert said.err.count("\n") == 1
    return said.err


TEXT = ("--data", "text.txt")
CHECK = [
    (["--data", "absent"], "cannot read the text absent: No such file"),
    (["--data", "empty"], "holds 0 bytes of text"),
    (["--config", "absent.toml"], "cannot read the config absent.toml"),
    ([*TEXT, "model.widht=3"], "unknown field model.widht; did you mean model.width?"),
    ([*TEXT, "model.width=wide"], "model.width = 'wide' has the wrong type"),
    ([*TEXT, "--nproc", "3"], "optimizer.batch = 16 does not fit 3 ranks"),
    ([*TEXT, "--nproc", "0"], "--nproc 0 is too few"),
    ([*TEXT, "--nproc", "-1"], "--nproc -1 is too few"),
    ([*TEXT, "--nproc", "2", "run.ranks=4"], "run.ranks = 4, but there are 2 ranks"),
    ([*TEXT, "--mesh", "dp=2,xp=2"], "the mesh dp=2,xp=2 names 'xp=2', which is no axis"),
    ([*TEXT, "--mesh", "dp=2,tp=2", "--nproc", "2"], "the mesh dp=2,tp=2 is for 4 ranks, but there are 2"),
    ([*TEXT, "--mesh", "ep=2"], "ep=2, but the model has no experts"),
    ([*TEXT, "--steps", "-5"], "run.steps = -5 is out of its limits"),
    ([*TEXT, "--steps", "many"], "argument --steps: invalid int value: 'many'"),
    ([*TEXT, "--stpes", "5"], "unrecognized arguments: --stpes"),
    ([*TEXT, "steps"], "'steps' is not an assignment"),
    ([*TEXT, "--out", "text.txt"], "text.txt is not an empty folder"),
    ([*TEXT, "--out", "text.txt/run"], "cannot write to text.txt/run: Not a directory"),
    ([*TEXT, "--resume", "--config", "odd.json"], "run = 3 stands outside a section"),
    ([*TEXT, "--resume"], "there is no run under"),
    ([*TEXT, "--resume", "--out", "absent"], "absent holds no checkpoint to resume from"),
]


@pytest.mark.parametrize(("words", "said"), CHECK, ids=[" ".join(words) for words, _ in CHECK])
def test_bad_input_is_refused_in_one_line_before_any_rank_starts(capsys, started, tmp_path, words, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.json").write_text('{"run": 3}')
    assert said in refused(capsys, *words)
    assert not started
    assert not (tmp_path / "runs").exists()


def test_no_command_is_refused_too(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_refusal_loads_no_torch():
    program = "import sys; from sherd.train.cli import main; assert main(['train', '--data', 'absent']) == 2; "
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_help_names_the_fields(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--help"])
    assert left.value.code == 0
    assert "learning rate" in capsys.readouterr().out


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", "--what"]) == 2
    assert capsys.readouterr().err == ""


def test_a_start_says_how_many_ranks_it_starts_unless_it_is_to_be_quiet(started, capsys):
    for quiet, said in (([], "starting 2 ranks ...\n"), (["--quiet"], "")):
        assert cli.main(["train", *TEXT, "run.device=cpu", *quiet]) == 0
        assert capsys.readouterr().out == said


def test_two_processes_and_a_new_numbered_folder_are_the_default(started, tmp_path):
    for expected in ("1", "2"):
        assert cli.main(["train", *TEXT, "run.device=cpu"]) == 0
        assert started[-1] == (2, ["train", *TEXT, "run.device=cpu", "--out", f"runs/{expected}"])
        assert (tmp_path / "runs" / expected).is_dir()


def test_the_number_of_ranks_is_the_words_the_configs_or_the_default(started):
    cli.main(["train", *TEXT, "--nproc", "1"])
    cli.main(["train", *TEXT, "run.ranks=4", "optimizer.micro_batch=1"])
    cli.main(["train", *TEXT, "--mesh", "dp=2,cp=2"])
    assert [num_ranks for num_ranks, _ in started] == [1, 4, 4]


def test_words_go_before_the_config_file_and_options_before_words(started, tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('[run]\nsteps = 5\nseed = 6\n[data]\npath = "text.txt"\n')
    args = parse(["train", "--config", "run.toml", "--steps", "7", "run.keep=3"])
    config, _ = configure(args)
    assert (config.run.steps, config.run.seed, config.run.keep, config.data.path) == (7, 6, 3, "text.txt")


def test_a_folder_that_holds_anything_is_not_written_to(capsys, started, tmp_path):
    put(tmp_path / "run", 3)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert "--resume goes on with the run in it" in refused(capsys, *TEXT, "--out", "run")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_resuming_takes_the_config_of_the_run_changed_by_the_words_but_not_its_ranks(tmp_path):
    saved = Config.of(TREE, {"run": {"ranks": 4}}).tree()
    put(tmp_path / "run", 3, config=saved)
    args = parse(["train", "--resume", "--out", "run", "optimizer.lr=0.5"])
    config, resumed = configure(args)
    assert resumed is not None
    assert resumed.manifest.step == 3
    assert config.run.ranks == 0
    assert config.optimizer.lr == 0.5
    assert config.model == Config.of(TREE).model


def test_resuming_without_a_folder_takes_the_last_numbered_run(tmp_path):
    for number in (2, 10, 9):
        put(tmp_path / "runs" / str(number), number)
    config, resumed = configure(parse(["train", "--resume"]))
    assert resumed is not None
    assert resumed.manifest.step == 10
    assert config.run.out == "runs/10"


def test_a_checkpoint_of_another_model_or_text_or_half_written_is_refused(capsys, started, tmp_path):
    path = put(tmp_path / "run", 3)
    words = (*TEXT, "--out", "run", "--resume")
    assert "is a checkpoint of another model: model.width" in refused(capsys, *words, "model.width=64")
    assert "was trained on another text than text.txt holds now" in refused(capsys, *words)
    break_it(path, "missing file")
    assert "is half-written (data is missing)" in refused(capsys, *words)
    assert not started


def losses(out):
    metrics = out / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def command(words):
    """`sherd` with these words. The ranks that it starts are new Pythons."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    sys.exit(cli.main(words))


def test_a_run_stopped_by_sigterm_is_saved_and_goes_on_with_the_losses_of_one_never_stopped(world, tmp_path):
    tree = {**TREE, "data": {**TREE["data"], "path": str(tmp_path / "text.txt")}}
    tree["run"] = {**TREE["run"], "steps": 150, "save_every": 0}
    (tmp_path / "run.json").write_text(json.dumps(tree))
    words = ["train", "--config", "run.json", "--out", "run"]
    process = start(command, words, folder=tmp_path, output=tmp_path / "said")
    while not losses(tmp_path / "run") and process.is_alive():
        time.sleep(0.02)
    process.terminate()
    process.join()
    out, err = (tmp_path / "said").read_text(), (tmp_path / "said.err").read_text()
    assert (process.exitcode, err) == (143, "")
    first = losses(tmp_path / "run")
    assert f"stopped after step {max(first)}, which is saved" in out

    upto, config = max(first) + 2, Config.of(tree)
    rest, _, _ = world(2).run(run, config, tmp_path / "run", resume=True, stop_after=upto)[0]
    never_stopped, _, _ = world(2).run(run, config, tmp_path / "whole", stop_after=upto)[0]
    assert {**first, **rest} == never_stopped
    assert list(never_stopped) == list(range(1, upto + 1))
