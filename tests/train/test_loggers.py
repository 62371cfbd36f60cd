"""Figures also get to TensorBoard and to a user's function, and neither of them can end a run."""

import importlib.machinery
import importlib.util
import json
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


def test_the_lines_of_the_guide_are_a_logger(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs/do/train.md").read_text()
    lines = re.search(r"^    import json\n(    .*\n)+", guide, re.M)
    (tmp_path / "of_the_guide.py").write_text(textwrap.dedent(lines[0]))
    monkeypatch.syspath_prepend(str(tmp_path))
    with RunReport(tmp_path, Loggers(logging("of_the_guide:start"), tmp_path), quiet=True) as report:
        report.write("evaluation", step=3, bits=2.0)
    assert json.loads(capsys.readouterr().out) == {"step": 3, "held_out": 2.0, "held_out_nats": 2.0 * math.log(2)}
    del sys.modules["of_the_guide"]


def pretended(monkeypatch, name, **names):
    """A package that only notes what it is called with."""
    module = types.ModuleType(name)
    vars(module).update(names)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)


def test_wandb_is_one_word_and_a_resumed_run_goes_on_in_it(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda data, step: calls.append((data, step)), finish=lambda: calls.append("finished")
    )
    pretended(monkeypatch, "wandb", init=lambda **given: (calls.append(given), run)[1])
    for step in (3, 4):
        with RunReport(tmp_path, Loggers(logging("wandb"), tmp_path), quiet=True) as report:
            report.write("evaluation", step=step, bits=2.0)
    first, (scalars, step), finished, second, *_ = calls
    assert first == second
    assert (first["dir"], first["name"], first["resume"]) == (str(tmp_path), tmp_path.name, "allow")
    assert first["config"]["run"]["seed"] == 5
    assert (scalars["held_out"], step, finished) == (2.0, 3, "finished")


def test_mlflow_is_one_word_and_a_resumed_run_goes_on_in_it(tmp_path, monkeypatch):
    calls = []

    def start_run(**given):
        calls.append(given)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    pretended(
        monkeypatch,
        "mlflow",
        start_run=start_run,
        log_params=lambda fields: calls.append(fields["run.seed"]),
        log_metrics=lambda scalars, step: calls.append((scalars["held_out"], step)),
        end_run=lambda: calls.append("ended"),
    )
    for step in (3, 4):
        with RunReport(tmp_path, Loggers(logging("mlflow"), tmp_path), quiet=True) as report:
            report.write("evaluation", step=step, bits=2.0)
    assert calls == [{"run_name": tmp_path.name}, 5, (2.0, 3), "ended", {"run_id": "7"}, (2.0, 4), "ended"]


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
    assert "must be tensorboard, wandb, mlflow, or module:function" in one_line(InputError, logging, "mine")


def test_tensorboard_without_its_package_is_refused_before_anything_is_loaded(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    for asked in ({"tensorboard": True}, {"logger": "tensorboard"}):
        with pytest.raises(InputError, match="the logger tensorboard needs the package tensorboard: pip install"):
            require_loggers(Config.of({"run": asked}))
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
