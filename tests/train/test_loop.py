"""The trainer trains, and a run that stops and goes on does exactly what one without a stop does."""

import contextlib
import io
import json
import math
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from sherd.tools.plan.files import TIMELINE, from_json
from sherd.tools.simulate.timeline import Lane
from sherd.train import loop, parallel
from sherd.train.axes import axes_of
from sherd.train.config import Config, InputError
from sherd.train.data import batch, tokens
from sherd.train.loop import (
    BETAS,
    FINAL_LR,
    LARGEST_NORM,
    WEIGHT_DECAY,
    Trainer,
    finish,
    introduce,
    learning_rate,
    train,
)
from sherd.train.mesh import RankGrid
from sherd.train.models import Decoder
from sherd.train.report import Report
from sherd.train.saved import folder_in, newest
from sherd.train.text import read_corpus
from tests.support.comparing import assert_same, whole_params
from tests.support.graphs import Graph
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import refusal

MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24}
TREE = {**MODEL, "context": 16, "batch": 12, "micro_batch": 2, "warmup": 2, "lr": 0.01, "steps": 6, "every": 2}


def config(text, **fields):
    return Config.of(TREE, {"data": text}, fields)


def grid(config):
    return RankGrid(axes_of(config, dist.get_world_size()), "cpu")


def trainer_of(config):
    """A trainer on this rank, of a run of all ranks."""
    return Trainer(config, read_corpus(config.data, config.context), grid(config))


class Recorded(Report):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.records, self.lines = [], []

    def say(self, text):
        self.lines.append(text)

    def write(self, event, **record):
        self.records.append((event, record))


def run(config, out, resume=False, stop_after=None, **how):
    """Losses by step, and whether the run finished; every rank's view."""
    report, trainer = Recorded(), trainer_of(config)
    if resume:
        trainer.resume(newest(folder_in(out)))
    finished = train(trainer, out, report, lambda: trainer.done + 1 == stop_after, **how)
    losses = {record["step"]: record["loss"] for event, record in report.records if event == "step"}
    return losses, finished, report.lines


def test_a_run_of_any_number_of_ranks_has_the_losses_of_plain_pytorch(world, text, tmp_path):
    chosen = config(text, steps=3, every=0)
    expected = plain_losses(chosen)
    for num_ranks in (1, 2, 3):
        for losses, finished, _ in world(num_ranks).run(run, chosen, tmp_path / str(num_ranks)):
            assert finished
            assert [losses[step] for step in (1, 2, 3)] == pytest.approx(expected, rel=1e-5)


def plain_losses(chosen):
    """The same training in one process: no shards, no micro-batches."""
    model, corpus = Decoder(chosen), read_corpus(chosen.data, chosen.context)
    model.reset_parameters(chosen.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    losses = []
    for step in range(chosen.steps):
        inputs, targets = batch(tokens(corpus.train), chosen.context, chosen.seed, step * chosen.batch, chosen.batch)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, chosen)
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
    assert newest(folder_in(folder / "cut")).step == 3
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
    finished = train(trainer, tmp_path, Report(), lambda: dist.get_rank() == 1 and trainer.done == 1)
    assert (finished, trainer.done) == (False, 2)
    wider = trainer_of(config(text, hidden=32))
    assert "feed_forward.gate.weight" in refusal(InputError, wider.resume, newest(folder_in(tmp_path)))


def plans(configs, planned_after):
    """How many steps each of them has once that many are done."""
    found = []
    with mock.patch.object(loop, "PLANNED_AFTER", planned_after):
        for each in configs:
            trainer = trainer_of(each)
            for _ in range(planned_after):
                trainer.step()
            found.append(trainer.config.steps)
    return found


def test_without_a_number_of_steps_all_ranks_agree_on_what_fits_into_the_minutes(world, text):
    long, short = (config(text, steps=0, minutes=minutes) for minutes in (60.0, 1e-9))
    one, other = world(2).run(plans, [long, short], 4)
    assert one == other
    assert one[0] > 4
    assert one[1] == 4 + 1


def evaluate(config):
    trainer = trainer_of(config)
    return trainer.judge(), trainer.judge(3), trainer.sample(3)


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
    assert said.endswith("--resume with a lower lr")


def write_report(config, out):
    trainer, said = trainer_of(config), io.StringIO()
    with contextlib.redirect_stdout(said), Report(out) as report:
        introduce(trainer, out, None, report)
        train(trainer, out, report)
        finish(trainer, out, report)
    return said.getvalue()


def test_a_run_leaves_metrics_and_a_sample_and_ends_with_its_bits(world, text, tmp_path):
    chosen = config(text, every=6)
    said = world(1).run(write_report, chosen, tmp_path)[0].splitlines()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [record["event"] for record in records]
    assert [each for each in events if each != "checkpoint"] == ["start", *["step"] * 6, "evaluation"]
    assert events.count("checkpoint") == 1
    assert {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "peak_bytes"} <= records[1].keys()
    assert Config.of(records[0]["config"]) == chosen
    assert 0 < len((tmp_path / "sample.txt").read_text()) <= 300
    bits = records[-1]["bits"]
    assert said[0] == "model  8,016 parameters, sharded over 1 rank on cpu"
    held_out, model, try_next = said[-3:]
    assert held_out == f"held-out  {bits:.3f} bits per byte ({bits * math.log(2):.3f} nats), over all 46 bytes"
    assert model == f"model     {tmp_path}/checkpoints/step-00000006"
    assert try_next == f'try       sherd generate {tmp_path} --prompt "def " --tokens 200'
    assert f"step      6  saved to {tmp_path}/checkpoints/step-00000006" in said
    assert said.index("drawing the sample, 200 bytes ...") < said.index("sample")


def test_the_rate_climbs_to_its_peak_stays_there_while_the_steps_are_unknown_and_falls_along_half_a_cosine():
    choice = Config(lr=1.0, warmup=4, steps=25)
    rates = [learning_rate(step, choice) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx((1 + FINAL_LR) / 2)
    assert rates[24] == pytest.approx(FINAL_LR)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(30, Config(lr=1.0, warmup=4)) == 1.0
    for num_steps in (1, 3, 5, 6):  # not longer than the warm-up
        rates = [learning_rate(step, Config(lr=1.0, warmup=5, steps=num_steps)) for step in range(num_steps)]
        assert all(0 < rate <= 1 for rate in rates), num_steps


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
        (2, {"checkpointing": 1.0, "precision": "bf16"}),
        (4, {"mesh": "replicate=2,dp=2"}),
        (4, {"mesh": "dp=2,tp=2"}),
    ],
    ids=str,
)
def test_a_step_that_is_recorded_changes_no_loss(world, text, tmp_path, num_ranks, changed):
    chosen = config(text, kv_heads=2, batch=16, steps=3, every=0, **changed)
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
    ((_, lines),) = world(1).run(recorded, [config(text, steps=2, every=0)], tmp_path, [0])[0]
    assert lines[0].startswith("step      2  recorded in")


def replaying(configs, outs, resume=False):
    """Of each run: the losses, and how often a graph was replayed."""
    found = []
    for config, out in zip(configs, outs, strict=True):
        with Graph().for_trainers() as graph:
            losses, _, _ = run(config, out, resume)
            found.append((losses, graph.num_replays))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "changed"),
    [(2, {}), (2, {"reshard": False, "optimizer": "muon"}), (4, {"mesh": "dp=2,tp=2", "kv_heads": 2, "batch": 16})],
    ids=str,
)
def test_replays_of_a_graph_have_the_losses_of_eager_steps(world, text, tmp_path, num_ranks, changed):
    eager, replayed = (config(text, steps=5, cuda_graph=graph, **changed) for graph in (False, True))
    folders = [tmp_path / "eager", tmp_path / "replayed"]
    for (expected, none), (losses, num_replays) in world(num_ranks).run(replaying, [eager, replayed], folders):
        assert losses == expected
        assert (none, num_replays) == (0, 5)


def test_a_run_that_is_resumed_replays_what_was_loaded(world, text, stopped, tmp_path):
    whole, _, cut = stopped
    shutil.copytree(cut, tmp_path / "cut")
    ((losses, num_replays),) = world(2).run(replaying, [config(text, cuda_graph=True)], [tmp_path / "cut"], True)[0]
    assert losses == {step: whole[step] for step in (4, 5, 6)}
    assert num_replays == 3


@on_processes(2)
def test_a_load_leaves_the_shards_at_the_addresses_of_the_graph(text, tmp_path):
    trainer = trainer_of(config(text, steps=2))
    train(trainer, tmp_path, Report())
    before = [each.to_local().data_ptr() for each in trainer.model.parameters()]
    trainer.resume(newest(folder_in(tmp_path)))
    assert [each.to_local().data_ptr() for each in trainer.model.parameters()] == before


@on_processes(2)
def test_what_no_graph_would_repeat_is_refused_before_the_first_step(text, tmp_path):
    chosen = config(text, cuda_graph=True)

    class Moving(Decoder):
        """Has a buffer that each step puts elsewhere."""

        def forward(self, tokens):
            self.register_buffer("seen", torch.zeros(4096 * 2 ** len(KEPT)))
            KEPT.append(self.seen)
            return super().forward(tokens)

    KEPT = []
    with Graph().for_trainers() as graph, mock.patch.object(parallel, "Decoder", Moving):
        said = refusal(InputError, trainer_of, chosen)
        assert said.startswith("cuda_graph = true, but a step cannot be captured: address: buffer seen: at other")
        assert "\n" not in said
    with graph.for_trainers():
        trainer = trainer_of(chosen)
        assert refusal(InputError, train, trainer, tmp_path, Report(), trace=0).startswith("--trace records")
    assert trainer.done == 0
