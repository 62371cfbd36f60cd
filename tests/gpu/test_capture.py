"""A step of AdamW with clipping may be captured; on CUDA it is, and its replays give the values of eager steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import sherd
from sherd.train.axes import axes_of
from sherd.train.config import Config, InputError
from sherd.train.loop import Trainer
from sherd.train.mesh import RankGrid
from sherd.train.passes import Batch, Passes
from sherd.train.text import read_corpus
from tests.gpu.devices import Accelerator, here
from tests.gpu.setting_model import batch, made
from tests.gpu.setting_runs import shard_units
from tests.gpu.settings import Setting
from tests.support.graphs import Graph
from tests.support.models import next_token_loss
from tests.support.refusals import one_line


@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_a_step_may_be_captured_and_on_cuda_replays_give_the_values_of_eager_steps(placement, alone, accelerator):
    setting = Setting(placement=placement, mesh=(1,))
    model = shard_units(setting, made(setting, here().device), alone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, foreach=True)
    tokens = batch(0, 0, 0).to(here().device)

    def step() -> None:
        next_token_loss(model, tokens).backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report = sherd.capturable(model, step)
    assert report, str(report)
    assert report.is_replayed == (accelerator.kind == "cuda")


MODEL = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "hidden": 64, "context": 32, "batch": 4, "micro_batch": 2}


@pytest.fixture
def chosen(tmp_path: Path) -> Config:
    (tmp_path / "text.txt").write_text("some words, and some more of them. " * 300)
    return Config.of(MODEL, {"data": str(tmp_path / "text.txt"), "steps": 5, "warmup": 2})


def trainer_of(config: Config, accelerator: Accelerator) -> Trainer:
    return Trainer(config, read_corpus(config.data, config.context), RankGrid(axes_of(config, 1), accelerator.kind))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trainer_that_replays_has_the_losses_of_eager_steps(precision, chosen, accelerator):
    """On CUDA by a graph of the device, elsewhere by one that Python replays."""
    losses, graph = [], Graph()
    for cuda_graph in (False, True):
        config = replace(chosen, precision=precision, cuda_graph=cuda_graph)
        with contextlib.nullcontext() if accelerator.kind == "cuda" else graph.for_trainers():
            trainer = trainer_of(config, accelerator)
            losses.append([trainer.step().loss for _ in range(5)])
            losses[-1].append(trainer.judge(4))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][4] < losses[0][0]
    assert graph.waits == []
    assert graph.num_replays == (0 if accelerator.kind == "cuda" else 5)


@pytest.mark.usefixtures("alone")
def test_a_trainer_whose_step_waits_on_the_host_is_refused_by_the_line_that_waits(chosen, accelerator):
    train = Passes.train

    def waiting(passes: Passes, micro_batches: Iterable[Batch], num: int) -> torch.Tensor:
        loss = train(passes, micro_batches, num)
        return loss + loss.item()

    with mock.patch.object(Passes, "train", waiting):
        said = one_line(InputError, trainer_of, replace(chosen, cuda_graph=True), accelerator)
    assert said.startswith("cuda_graph = true, but a step cannot be captured: host sync: the host waits")
    assert "test_capture.py:" in said
