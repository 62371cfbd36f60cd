"""The trainer trains, and a run that stops and goes on does exactly what one without a stop does."""

import contextlib
import io
import json
import lzma
import math
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from sherd.tools.plan.files import TIMELINE, from_json
from sherd.tools.simulate.timeline import Lane
from sherd.train import loop
from sherd.train.axes import axes_of
from sherd.train.config import Config, InputError, OptimizerConfig
from sherd.train.data import batch, tokens
from sherd.train.loop import Trainer, introduce, learning_rate, lzma_bits, train
from sherd.train.mesh import RankGrid
from sherd.train.models import Decoder
from sherd.train.report import RunReport, Silent
from sherd.train.saved import newest
from sherd.train.text import read_corpus
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import refusal

TREE = {
    "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24},
    "data": {"context": 16, "held_out": 0.1},
    "optimizer": {"batch": 12, "micro_batch": 2, "warmup": 2, "lr": 0.01},
    "run": {"steps": 6, "eval_every": 0, "save_every": 2, "keep": 9, "sample": 3},
}


def config(text, **run):
    return Config.of(TREE, {"data": {"path": text}, "run": run})


def grid(config):
    return RankGrid(axes_of(config, dist.get_world_size()), "cpu")


def trainer_of(config):
    """A trainer on this rank, of a run of all ranks."""
    return Trainer(config, read_corpus(config.data), grid(config))


class Recorded(Silent):
    """Keeps what it is told."""

    def __init__(self):
        self.records, self.lines = [], []

    def say(self, text):
        self.lines.append(text)

    def write(self, event, **record):
        self.records.append((event, record))

    def step(self, **record):
        self.write("step", **record)


def run(config, out, resume=False, stop_after=None, **how):
    """Losses by step, and whether the run finished; every rank's view."""
    report, trainer = Recorded(), trainer_of(config)
    if resume:
        trainer.resume(newest(out))
    finished = train(trainer, out, report, lambda: trainer.done + 1 == stop_after, **how)
    losses = {record["step"]: record["loss"] for event, record in report.records if event == "step"}
    return losses, finished, report.lines


def test_a_run_of_any_number_of_ranks_has_the_losses_of_plain_pytorch(world, text, tmp_path):
    chosen = config(text, steps=3, save_every=0)
    expected = plain_losses(chosen)
    for num_ranks in (1, 2, 3):
        for losses, finished, _ in world(num_ranks).run(run, chosen, tmp_path / str(num_ranks)):
            assert finished
            assert [losses[step] for step in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)


def plain_losses(chosen):
    """The same training in one process: no shards, no micro-batches."""
    model, corpus, o = Decoder(chosen.model), read_corpus(chosen.data), chosen.optimizer
    model.reset_parameters(chosen.run.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2))
    losses = []
    for step in range(chosen.run.steps):
        inputs, targets = batch(tokens(corpus.train), chosen.data.context, chosen.run.seed, step * o.batch, o.batch)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, chosen.run.steps, o)
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    return losses


@pytest.fixture(scope="module")
def stopped(world, text, tmp_path_factory):
    """The losses of a run of two ranks that was never stopped; those of one that was, after step 3, and its folder."""
    folder = tmp_path_factory.mktemp("stopped")
    whole = world(2).run(run, config(text), folder / "whole")[0][0]
    first, finished, lines = world(2).run(run, config(text), folder / "cut", stop_after=3)[0]
    assert not finished
    assert "stopped after step 3, which is saved; --resume goes on from there" in lines[-1]
    assert newest(folder / "cut").step == 3
    return whole, first, folder / "cut"


def resumed(ranks, text, cut, folder):
    """The losses of a copy of the run that went on."""
    shutil.copytree(cut, folder / "cut")
    losses, finished, _ = ranks.run(run, config(text), folder / "cut", resume=True)[0]
    assert finished
    assert list(losses) == [4, 5, 6]
    return losses


def test_a_resumed_run_has_exactly_the_losses_of_one_never_stopped(world, text, stopped, tmp_path):
    whole, first, cut = stopped
    assert {**first, **resumed(world(2), text, cut, tmp_path)} == whole
    assert whole[6] < whole[1] - 0.5


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_resumed_on_another_number_of_ranks_has_the_same_losses(world, text, stopped, tmp_path, num_ranks):
    whole, _, cut = stopped
    rest = resumed(world(num_ranks), text, cut, tmp_path)
    assert rest == pytest.approx({step: whole[step] for step in rest}, rel=1e-5)


@on_processes(2)
def test_one_rank_told_to_stop_stops_all_after_the_same_step_and_other_shapes_do_not_load_it(text, tmp_path):
    trainer = trainer_of(config(text))
    finished = train(trainer, tmp_path, Silent(), lambda: dist.get_rank() == 1 and trainer.done == 1)
    assert (finished, trainer.done) == (False, 2)
    wider = trainer_of(Config.of(config(text).tree(), {"model": {"hidden": 32}}))
    other = "is a checkpoint of another model: its parameters have other names or shapes"
    assert other in refusal(InputError, wider.resume, newest(tmp_path))


def plans(configs, planned_after):
    """How many steps each of them has once that many are done."""
    found = []
    with mock.patch.object(loop, "PLANNED_AFTER", planned_after):
        for each in configs:
            trainer = trainer_of(each)
            for _ in range(planned_after):
                trainer.step()
            found.append(trainer.config.run.steps)
    return found


def test_without_a_number_of_steps_all_ranks_agree_on_what_fits_into_the_minutes(world, text):
    long, short = (config(text, steps=0, minutes=minutes) for minutes in (60.0, 1e-9))
    one, other = world(2).run(plans, [long, short], 4)
    assert one == other
    assert one[0] > 4
    assert one[1] == 4 + 1


def evaluate(config):
    trainer = trainer_of(config)
    return trainer.judge().bits, trainer.judge(3).bits, trainer.sample()


def test_evaluation_and_sample_do_not_depend_on_the_number_of_ranks(world, text):
    results = [result for n in (1, 2, 3) for result in world(n).run(evaluate, config(text))]
    bits, quick, sample = results[0]
    assert bits == pytest.approx(8, abs=0.2)  # an untrained model of bytes knows nothing
    for result in results:
        assert result[:2] == pytest.approx((bits, quick), rel=1e-6)
        assert result[2] == sample


@on_processes(2)
def test_a_loss_that_is_no_number_ends_the_run_on_all_ranks_before_it_reaches_the_weights(text):
    trainer = trainer_of(config(text))
    before = whole_params(trainer.model)
    trainer.model.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    said = refusal(InputError, trainer.step)
    assert_same(whole_params(trainer.model), before)
    assert said.startswith("step 1 has a loss of nan nats")
    assert said.endswith("--resume with a lower optimizer.lr")


def write_report(config, out):
    trainer, said = trainer_of(config), io.StringIO()
    with contextlib.redirect_stdout(said), RunReport(out) as report:
        introduce(trainer, out, None, report)
        train(trainer, out, report)
    return said.getvalue()


def test_a_run_leaves_metrics_a_sample_and_a_picture_and_ends_with_its_bits_beside_lzmas(world, text, tmp_path):
    pytest.importorskip("matplotlib")
    chosen = config(text, eval_every=2, async_save=False)
    said = world(1).run(write_report, chosen, tmp_path)[0].splitlines()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [record["event"] for record in records]
    assert events == ["start", *["step", "step", "checkpoint", "evaluation"] * 3]
    assert {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "peak_bytes"} <= records[1].keys()
    assert Config.of(records[0]["config"]) == chosen
    assert records[-1]["lzma_bits"] == lzma_bits(read_corpus(config(text).data).held_out)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "sample.txt").read_text()) <= 3
    bits, packed = records[-1]["bits"], records[-1]["lzma_bits"]
    assert said[0] == "model  8,016 parameters, sharded over 1 rank on cpu"
    nats = f"{bits * math.log(2):.3f} nats, perplexity {2**bits:,.2f}"
    held_out, lzma, written, model, try_next = said[-5:]
    assert held_out == f"held-out  {bits:.3f} bits per byte ({nats}), over all 461 bytes"
    assert lzma.startswith(f"lzma      {packed:.3f} bits per byte, for the same bytes compressed alone")
    assert written == f"written   curve.png, sample.txt, metrics.jsonl in {tmp_path}"
    assert model == f"model     {tmp_path}/checkpoints/step-00000006"
    assert try_next == f'try       sherd generate {tmp_path} --prompt "def " --tokens 200'
    assert f"step      2  saved to {tmp_path}/checkpoints/step-00000002" in said
    assert said.index("drawing the sample, 3 bytes ...") < said.index("sample")


def test_a_run_that_is_all_warm_up_begins_with_a_note(world, text, tmp_path):
    said = world(1).run(write_report, config(text, steps=1, sample=0), tmp_path)[0].splitlines()
    assert said[3].startswith("note   optimizer.warmup = 2 lasts longer than the run of 1 steps")


def write_report_of_minutes(config, path):
    with mock.patch.object(loop, "PLANNED_AFTER", 1):
        return write_report(config, path)


def test_minutes_that_are_all_warm_up_are_noted_once_they_are_a_number_of_steps(world, text, tmp_path):
    chosen = config(text, steps=0, minutes=1e-9, sample=0)
    chosen = Config.of(chosen.tree(), {"optimizer": {"warmup": 5}})
    said = world(1).run(write_report_of_minutes, chosen, tmp_path)[0].splitlines()
    assert sum("optimizer.warmup = 5 lasts longer than the run of 2 steps" in line for line in said) == 1


def test_the_rate_climbs_to_its_peak_stays_there_while_the_steps_are_unknown_and_falls_along_half_a_cosine():
    choice = OptimizerConfig(lr=1.0, warmup=4, final_lr=0.1)
    rates = [learning_rate(step, 25, choice) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert rates[24] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(30, 0, choice) == 1.0
    for num_steps in (1, 3, 5, 6):  # not longer than the warm-up
        rates = [learning_rate(step, num_steps, OptimizerConfig(lr=1.0, warmup=5)) for step in range(num_steps)]
        assert all(0 < rate <= 1 for rate in rates), num_steps


def test_lzma_bits_are_those_of_the_bytes_alone():
    raw = bytes(range(256)) * 4
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    assert lzma_bits(raw) == 8 * len(packed) / 1024


def recorded(configs, out, traces):
    """Of each run, in a folder of its number: the losses, and what was said of a step that was recorded."""
    found = []
    for number, (config, at) in enumerate(zip(configs, traces, strict=True)):
        folder = out / str(number)
        folder.mkdir(exist_ok=True)
        losses, _, lines = run(config, folder, trace=at)
        found.append((list(losses.values()), [line for line in lines if "recorded in" in line]))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "changed"),
    [
        (2, {}),
        (2, {"checkpointing": True, "precision": "bf16"}),
        (4, {"mesh": "replicate=2,dp=2"}),
        (4, {"mesh": "dp=2,tp=2"}),
        (2, {"mesh": "pp=2"}),
    ],
    ids=str,
)
def test_a_step_that_is_recorded_changes_no_loss(world, text, tmp_path, num_ranks, changed):
    model = {"tied": changed.get("mesh") != "pp=2", "kv_heads": 2}
    run_of = {"steps": 3, "save_every": 0, "sample": 0, **changed}
    optimizer = {"batch": 16 if "replicate" in changed.get("mesh", "") else 8}
    chosen = Config.of(TREE, {"data": {"path": text}, "optimizer": optimizer, "model": model, "run": run_of})
    out = tmp_path / "1"
    for (plain, silent), (losses, lines) in world(num_ranks).run(recorded, [chosen] * 2, tmp_path, [None, 0]):
        assert losses == plain
        assert lines == [f"step      3  recorded in {out / TIMELINE}; sherd report {out} shows it"]
        assert not silent
    timeline = from_json((out / TIMELINE).read_text())
    assert timeline.title == f"step 3 of 1 on {num_ranks} ranks"
    assert timeline.peak.nbytes > timeline.peak.by_kind["shards"] > 0
    names = {(span.lane, span.name) for span in timeline.spans}
    assert {(Lane.GATHER, "gather"), (Lane.COMPUTE, "backward"), (Lane.COMPUTE, "optimizer")} <= names
    assert ((Lane.COMPUTE, "recompute") in names) == ("checkpointing" in changed)
    assert ((Lane.ALL_REDUCE, "all-reduce") in names) == ("replicate" in changed.get("mesh", ""))


def test_of_a_short_run_the_last_step_is_recorded(world, text, tmp_path):
    ((_, lines),) = world(1).run(recorded, [config(text, steps=2, save_every=0)], tmp_path, [0])[0]
    assert lines[0].startswith("step      2  recorded in")
