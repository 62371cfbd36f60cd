"""Checkpoints of models on a device: saved by this thread or another one while training goes on, and loaded there."""

from __future__ import annotations

import pytest
import torch

import sherd
from tests.device.small import built, sharded, step


def trained_while_saving(folder: str, how: str) -> list[float]:
    """The losses after a save that another thread finishes, and the same again after a load."""
    model = sharded(built("sim"), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step(model, optimizer, 0)
    items = {"model": model, "optimizer": optimizer}
    saving = sherd.async_save(folder, items, step=1)
    losses = [step(model, optimizer, number) for number in (1, 2)]
    saving.wait()
    sherd.load(folder, items)
    assert [step(model, optimizer, number) for number in (1, 2)] == losses
    sherd.load(folder, items)
    sherd.save(folder, items, step=2)
    return losses


@pytest.mark.parametrize("how", ["shard", "flat", "flat wrapper", "shard, offloaded"])
def test_a_device_trains_on_while_its_shards_are_written_and_goes_on_from_them(sim_world, tmp_path, how):
    losses = sim_world(2, pause_us=300).run(trained_while_saving, str(tmp_path), how).values[0]
    model = built("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    for saved in (1, 2):
        sherd.load(tmp_path, {"model": model, "optimizer": optimizer}, step=saved)
        found = [step(model, optimizer, number, "cpu") for number in (1, 2)]
        assert found == pytest.approx(losses, rel=1e-4)
