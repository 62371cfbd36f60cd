"""A step of AdamW with clipping may be captured; on CUDA it is, and its replays give the values of eager steps."""

from __future__ import annotations

import pytest
import torch

import sherd
from tests.gpu.devices import here
from tests.gpu.setting_model import batch, made
from tests.gpu.setting_runs import shard_units
from tests.gpu.settings import Setting
from tests.support.models import next_token_loss


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
