"""Figures also get to TensorBoard and to a user's function, and neither of them can end a run."""

import importlib.util
import math
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

from sherd.train.config import Config, InputError
from sherd.train.loggers import Loggers, require_loggers
from sherd.train.report import RunReport
from tests.support.refusals import one_line
from tests.train.test_report import RECORD

MODULE = """
told = []
def start(out, config):
    told.append((out, config["run"]["seed"]))
    def log(scalars, step):
        told.append((scalars, step))
    log.close = lambda: told.append("closed")
    return log

def start_failing(out, config):
    def log(scalars, step):
        told.append(step)
        raise ConnectionError("the network\\nis away")
    return log

def start_badly(out, config):
    raise KeyError("no key")

def start_nothing(out, config):
    pass
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What the functions of a module `mine` were called with."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("mine").told
    del sys.modules["mine"]


def logging(function):
    return Config.of({"run": {"logger": function, "seed": 5}})


def test_a_users_function_gets_every_step_and_evaluation_and_is_closed(tmp_path, told):
    with RunReport(tmp_path, Loggers(logging("mine:start"), tmp_path), quiet=True) as report:
        report.write("start", step=0)
        report.step(**RECORD)
        report.write("evaluation", step=3, bits=2.0)
        report.write("checkpoint", step=3, path="there")
    step = {name: RECORD[name] for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second")}
    assert told == [
        (tmp_path, 5),
        ({**step, "loss_nats": 2.5 * math.log(2)}, 3),
        ({"held_out": 2.0, "held_out_nats": 2.0 * math.log(2)}, 3),
        "closed",
    ]


def test_the_lines_of_the_guide_are_all_that_wandb_needs(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs/do/train.md").read_text()
    lines = re.search(r"^    import wandb\n(    .*\n)+", guide, re.M)
    (tmp_path / "my_wandb.py").write_text(textwrap.dedent(lines[0]))
    wandb = types.ModuleType("wandb")
    logged = []
    wandb.init = lambda project, dir, config: types.SimpleNamespace(
        log=lambda data, step=None, commit=None: logged.append((data, step))
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RunReport(tmp_path, Loggers(logging("my_wandb:start"), tmp_path), quiet=True) as report:
        report.write("evaluation", step=3, bits=2.0)
    assert logged == [({"held_out": 2.0, "held_out_nats": 2.0 * math.log(2)}, 3)]
    del sys.modules["my_wandb"]


def test_a_logger_that_fails_is_told_once_and_left_out_and_the_run_goes_on(tmp_path, told, capsys):
    with RunReport(tmp_path, Loggers(logging("mine:start_failing"), tmp_path)) as report:
        for step in (1, 2):
            report.write("evaluation", step=step, bits=2.0)
    assert told == [1]
    assert capsys.readouterr().out == (
        "note   the logger mine:start_failing failed (ConnectionError: the network is away); it gets nothing more, "
        "the run goes on\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.usefixtures("told")
def test_a_logger_that_cannot_be_started_is_refused_in_one_line(tmp_path):
    for name, said in (
        ("mine:start_badly", "run.logger = 'mine:start_badly' cannot be started: KeyError: 'no key'"),
        ("mine:start_nothing", "returned NoneType, which cannot be called"),
        ("mine:absent", "cannot be started: AttributeError"),
        ("no_such_module:start", "cannot be started: ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        assert said in one_line(InputError, Loggers, logging(name), tmp_path), name
    assert "must be module:function" in one_line(InputError, logging, "mine")


def test_tensorboard_without_its_package_is_refused_before_anything_is_loaded(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(InputError, match=r"run\.tensorboard needs the package tensorboard: install it"):
        require_loggers(Config.of({"run": {"tensorboard": True}}))
    require_loggers(Config())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_a_run_has_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config.of({"run": {"tensorboard": True}})
    with RunReport(tmp_path, Loggers(config, tmp_path), quiet=True) as report:
        for step in (3, 4):
            report.step(**{**RECORD, "step": step})
        report.write("evaluation", step=4, bits=2.0)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(3, 2.5), (4, 2.5)]
    assert [(each.step, each.value) for each in read.Scalars("held_out")] == [(4, 2.0)]
    assert {"gradient_norm", "learning_rate", "tokens_per_second"} <= set(read.Tags()["scalars"])
