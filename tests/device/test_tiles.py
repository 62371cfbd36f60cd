"""Layers and losses in parts train on a device: no read of a unit's parameters is without an order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.support.models import VOCABULARY, WIDTH, Block, tokens


class Head(nn.Linear):
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return sherd.chunked_cross_entropy(hidden, self.weight, target, bias=self.bias, chunk_tokens=5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), Head(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = sherd.tiled(block, x, tiles=3)
        return self.head(x, words.roll(-1, 1))


def trained(device: str, policy: Any = None) -> list[float]:
    """The losses of three steps. Both ranks have one batch, so they are those of one process."""
    model, losses = Model().to(device), []
    if policy is not None:
        mesh = init_device_mesh(device, (2,))
        for unit in (*model.blocks, model.head, model):
            sherd.fully_shard(unit, mesh=mesh, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss = model(tokens(step, 0).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", [{}, {"placement": sherd.Flat()}, {"reshard_after_forward": False}], ids=str)
def test_a_sharded_model_trains_in_parts_as_the_plain_one(sim_world, policy):
    found = sim_world(2).run(trained, "sim", policy)
    assert found.all_races == []
    for losses in found.values:
        assert losses == pytest.approx(trained("cpu"), rel=1e-5)
