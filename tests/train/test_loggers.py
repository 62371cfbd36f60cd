"""Figures also get to a user's function, and none can end a run. Those of packages: tests/interop/test_loggers.py."""

import importlib.util
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import pytest

from sherd.train.config import Config, InputError
from sherd.train.loggers import Logger, require_logger
from sherd.train.report import Report
from tests.support.refusals import one_line
from tests.train.test_report import RECORD

MODULE = """
told = []
def start(out, config):
    told.append((out, config["seed"]))
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
    return Config(logger=function, seed=5)


def test_a_users_function_gets_every_step_and_evaluation_and_is_closed(tmp_path, told):
    with Report(tmp_path, Logger(logging("mine:start"), tmp_path), quiet=True) as report:
        report.write("start", step=0)
        report.write("step", **RECORD)
        report.write("evaluation", step=3, bits=2.0)
        report.write("checkpoint", step=3, path="there")
    step = {name: RECORD[name] for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second")}
    assert told == [
        (tmp_path, 5),
        ({**step, "loss_nats": 2.5 * math.log(2)}, 3),
        ({"held_out": 2.0, "held_out_nats": 2.0 * math.log(2)}, 3),
        "closed",
    ]


def test_the_lines_of_the_guide_are_a_logger(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs/do/train.md").read_text()
    lines = re.search(r"^    import json\n(    .*\n)+", guide, re.M)
    (tmp_path / "of_the_guide.py").write_text(textwrap.dedent(lines[0]))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Report(tmp_path, Logger(logging("of_the_guide:start"), tmp_path), quiet=True) as report:
        report.write("evaluation", step=3, bits=2.0)
    assert json.loads(capsys.readouterr().out) == {"step": 3, "held_out": 2.0, "held_out_nats": 2.0 * math.log(2)}
    del sys.modules["of_the_guide"]


def test_a_logger_that_fails_is_told_once_and_left_out_and_the_run_goes_on(tmp_path, told, capsys):
    with Report(tmp_path, Logger(logging("mine:start_failing"), tmp_path)) as report:
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
        ("mine:start_badly", "logger = 'mine:start_badly' cannot be started: KeyError: 'no key'"),
        ("mine:start_nothing", "returned NoneType, which cannot be called"),
        ("mine:absent", "cannot be started: AttributeError"),
        ("no_such_module:start", "cannot be started: ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        assert said in one_line(InputError, Logger, logging(name), tmp_path), name
    assert "must be tensorboard, wandb, mlflow, or module:function" in one_line(
        InputError, Config.of, {"logger": "mine"}
    )


def test_tensorboard_without_its_package_is_refused_before_anything_is_loaded(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(InputError, match="the logger tensorboard needs the package tensorboard: pip install"):
        require_logger(Config(logger="tensorboard"))
    require_logger(Config())
