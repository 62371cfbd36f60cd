"""--dry-run is `sherd plan` of a run as it is configured, for any number of ranks and models that fit nowhere."""

import pytest

from sherd.cli.dry_run import planned
from sherd.cli.main import main
from sherd.train.config import Config

TREE = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "context": 32, "batch": 8}
TOML = "layers = 3\nwidth = 64\nhidden = 96\ncontext = 32\nbatch = 8\n"
RUNS = (
    "",
    "strategy = 'zero1'\nmicro_batch = 1\n",
    "placement = 'flat'\nreshard = false\nprecision = 'bf16'\n",
    "optimizer = 'muon'\nplacement = 'flat'\n",
    "wrapping = 'parts'\ncheckpointing = 1\nrecompute = 'selective'\n",
)


def dry(capsys, *words, device="cpu"):
    """What `sherd train --dry-run` prints of a run on such devices."""
    assert main(["train", "--dry-run", *words, f"device={device}"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_says_what_a_plan_of_the_config_does(capsys, tmp_path):
    path = tmp_path / "run.toml"
    for fields in RUNS:
        path.write_text(TOML + fields)
        assert main(["plan", str(path), "--as-configured", "--cluster", "laptop", "--ranks", "2"]) == 0
        _, *lines = capsys.readouterr().out.splitlines()
        said = dry(capsys, "--config", str(path), "--nproc", "2").splitlines()
        assert said[1 : len(lines) + 1] == lines, fields


def test_it_says_parameters_ranks_tokens_and_steps_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = dry(capsys, "--nproc", "8", "--mesh", "replicate=2,dp=2,tp=2", "--steps", "30", "batch=4")
    assert "820,352 parameters, replicate=2,dp=2,tp=2: 8 x " in said
    assert "4 samples of 128 tokens in a step" in said
    assert "1 micro-batch of 1 sample" in said
    assert "run         30 steps = 15,360 tokens" in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_fits_nowhere_is_planned_without_memory(capsys):
    large = ["width=8192", "layers=96", "hidden=32768", "heads=64", "batch=256"]
    said = dry(capsys, "--nproc", "256", *large, device="cuda")
    assert "90,600,644,608 parameters, dp=256: 256 x NVIDIA H100" in said
    assert "too much" not in said


def test_a_run_that_does_not_fit_its_ranks_and_a_setting_that_is_not_planned_are_refused(capsys):
    refusals = {
        ("--nproc", "5"): "batch=15",
        ("--mesh", "replicate=2,dp=2", "strategy=hfsdp"): "strategy = hfsdp is not planned",
    }
    for words, says in refusals.items():
        assert main(["train", "--dry-run", *words]) == 2
        assert says in capsys.readouterr().err, words


def test_each_rank_of_twice_as_many_has_half():
    config = Config.of(TREE, {"batch": 64})
    few, many = (planned(config, ranks).prediction.timeline.peak.by_kind for ranks in (4, 8))
    for kind in ("shards", "optimizer state"):
        assert few[kind] == pytest.approx(2 * many[kind], rel=0.01)
