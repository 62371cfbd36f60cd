"""Figures of a run get to TensorBoard, W&B and MLflow, also over several starts."""

import json
import os
import signal
import struct
from pathlib import Path

import pytest

from sherd.train.config import Config
from sherd.train.loggers import Logger
from sherd.train.report import Report
from sherd.train.trackers import MLflow, WeightsAndBiases
from tests.support.ranks.forked import answer_of, sherd, start
from tests.train.kills import prepared
from tests.train.test_report import RECORD

QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def ended(folder, logger, *words, stops=False):
    """The exit code of `sherd train` on two ranks, which is told to stop once it has done a step."""
    here = {**QUIET, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    words = ["train", "--config", "run.json", "--out", "run", "--resume-or-start", f"logger={logger}", *words]
    metrics = folder / "run/metrics.jsonl"
    process = start(sherd, words, here, folder=folder, output=folder / "said")
    while stops and process.exitcode is None and not (metrics.exists() and '"event": "step"' in metrics.read_text()):
        process.join(0.01)
    if stops and process.exitcode is None:
        os.kill(process.pid, signal.SIGINT)
    process.join()
    return process.exitcode, (folder / "said").read_text() + (folder / "said.err").read_text()


def stopped_gone_on_and_failed(folder, logger):
    """The losses that metrics.jsonl has after each of three starts of a run: of these steps, in their order."""
    prepared(folder)
    losses = []
    for code, stops, words in ((143, True, ["--steps", "100000"]), (0, False, []), (2, False, ["lr=1e30"])):
        steps = [] if stops else ["--steps", str(losses[-1][-1][0] + 2 if losses else 0)]
        found, said = ended(folder, logger, *words, *steps, stops=stops)
        assert found == code, said
        assert "logger" not in said, said
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        known = sum(len(each) for each in losses)
        losses.append([(each["step"], each["loss"]) for each in lines if each["event"] == "step"][known:])
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the package and of what it needs
def test_wandb_has_every_figure_in_one_run_and_knows_how_each_start_ended(tmp_path):
    losses = stopped_gone_on_and_failed(tmp_path / "x", "wandb")
    files = sorted((tmp_path / "x/run/wandb").glob("offline-run-*/*.wandb"))
    runs = [logged(file) for file in files]  # one for each start, although there were two ranks
    assert [run["losses"] for run in runs] == losses
    assert [run["exit"] for run in runs] == [255, 0, 1]
    assert len({run["id"] for run in runs}) == 1
    for run in runs:
        assert run["name"] == "run"
        assert json.loads(run["config"]["every"]) == 2


def logged(file):
    """What a run of W&B that is offline has written, to be sent later: a log of LevelDB's form, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = file.read_bytes(), 7, b"", {"losses": []}
    while at < len(data):
        if -at % 2**15 < 7:
            at += -at % 2**15
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part not in (1, 4):  # whole, or the last part
            continue
        record, whole = Record.FromString(whole), b""
        if record.HasField("run"):
            found |= {"id": record.run.run_id, "name": record.run.display_name}
            found["config"] = {each.key: each.value_json for each in record.run.config.update}
        elif record.HasField("exit"):
            found["exit"] = record.exit.exit_code
        elif record.HasField("history"):
            scalars = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
            if "loss" in scalars:
                found["losses"].append((scalars["_step"], scalars["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_figure_in_one_run_and_knows_how_each_start_ended(tmp_path):
    losses = stopped_gone_on_and_failed(tmp_path / "x", "mlflow")
    (run,) = answer_of(kept, str(tmp_path / "x"))
    assert run["losses"] == [each for start in losses for each in start]
    assert (run["name"], run["status"], run["params"]["every"]) == ("run", "FAILED", "2")


def told_of_each_end(folder, kind):
    """One run with a logger of that `kind`, which goes on twice. What MLflow has after each end."""
    os.environ.update({**QUIET, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"})
    found = []
    for step, outcome in enumerate(("finished", "stopped", "failed")):
        log = kind(Path(folder), {"every": 2})
        log({"loss": 2.0 + step}, step)
        log.end(outcome)
        found += kept(folder) if kind is MLflow else []
    return found


@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_in_one_run_and_has_the_status_of_each_end(tmp_path):
    runs = answer_of(told_of_each_end, str(tmp_path), MLflow)
    assert [run["status"] for run in runs] == ["FINISHED", "KILLED", "FAILED"]
    assert runs[-1]["losses"] == [(0, 2.0), (1, 3.0), (2, 4.0)]
    assert {run["params"]["every"] for run in runs} == {"2"}


@pytest.mark.filterwarnings("ignore")
def test_wandb_goes_on_in_one_run_and_has_the_code_of_each_end(tmp_path):
    answer_of(told_of_each_end, str(tmp_path), WeightsAndBiases)
    runs = sorted(map(logged, (tmp_path / "wandb").glob("offline-run-*/*.wandb")), key=lambda run: run["losses"])
    assert [(run["losses"], run["exit"]) for run in runs] == [([(0, 2.0)], 0), ([(1, 3.0)], 255), ([(2, 4.0)], 1)]
    assert len({run["id"] for run in runs}) == 1


def kept(folder):
    """Of each run in the database of MLflow, in that order of steps in which they came."""
    os.environ.update(QUIET)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return [
        {
            "losses": [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")],
            "name": run.info.run_name,
            "status": run.info.status,
            "params": run.data.params,
        }
        for run in client.search_runs(["0"])
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_a_run_has_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config(logger="tensorboard")
    with Report(tmp_path, Logger(config, tmp_path), quiet=True) as report:
        for step in (3, 4):
            report.write("step", **{**RECORD, "step": step})
        report.write("evaluation", step=4, bits=2.0)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(3, 2.5), (4, 2.5)]
    assert [(each.step, each.value) for each in read.Scalars("held_out")] == [(4, 2.0)]
    assert {"gradient_norm", "learning_rate", "tokens_per_second"} <= set(read.Tags()["scalars"])
