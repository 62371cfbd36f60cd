"""A few steps of a sharded `Setting` on a rank, taken one by one: for tests that do something in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.devices import here
from tests.gpu.setting_model import NUM_STEPS, batch, optimizer_of, plain
from tests.gpu.setting_runs import mesh_of, sharded, whole_on_host
from tests.gpu.settings import Setting
from tests.support.comparing import assert_same
from tests.support.models import next_token_loss


class Training:
    """The model of `setting`, sharded, and its optimizer. `numbers` are the steps to be taken."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model: Any = sharded(setting, mesh_of(setting.mesh))
        self.optimizer = optimizer_of(setting, self.model)
        self.taken = 0

    def backward(self, compute: Any = None) -> None:
        """The forward and the backward of the next step."""
        tokens = batch(self.taken, 0, dist.get_rank()).to(here().device)
        next_token_loss(compute or self.model, tokens).backward()

    def finish(self) -> None:
        """Update the parameters, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.finish()

    def assert_trained_plainly(self) -> None:
        """Finish all steps, and compare with the plain model."""
        self.steps(NUM_STEPS - self.taken)
        assert_parameters(self.model, plain(self.setting)[dist.get_rank()].params)


def assert_parameters(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Compare unsharded parameters on the host; all ranks call it."""
    assert_same(whole_on_host(model), expected, rtol=1e-4, atol=1e-5)
