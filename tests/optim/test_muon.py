"""Muon trains as `torch.optim.Muon` does in one process, however its matrices are sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from sherd import Blocks, Flat, MatrixOptimizer, Muon, Owned
from sherd.optim.newton_schulz import QUINTIC, coefficients_of, orthogonalized
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

EXACT = {"ns_dtype": torch.float32}


def stack() -> nn.Sequential:
    """Wide, tall, square and odd matrices, with biases and norms."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 4), nn.Linear(4, 3)
    )


def torchs_steps(model: nn.Module, batches: list[torch.Tensor], **options) -> None:
    """Steps as `torch.optim.Muon` does, with products in float32, and torch's AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    momenta = [torch.zeros_like(p) for p in matrices]
    for batch in batches:
        model(batch).square().mean().backward()
        with torch.no_grad():
            for p, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(p.grad, 0.05)
                update = p.grad.lerp(momentum, 0.95)
                update = orthogonalized(update[None], coefficients_of(QUINTIC, 5), 1e-7, torch.float32)[0]
                p.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        others.step()
        model.zero_grad()


def batches(steps: int = 20) -> list[torch.Tensor]:
    return [torch.randn(6, 5, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


@on_threads(1, 2, 3, 4, front=["shard", "flat", "blocks", "owned", "wrapper", "dim1"])
def test_muon_trains_as_in_one_process(front):
    plain, model = stack(), stack()
    torchs_steps(plain, batches())
    if front == "dim1":
        model = sharded(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    else:
        model = sharded(model, front)
    optimizer = Muon(model, lr=0.02, **EXACT)
    for batch in batches():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, found), expected in zip(whole_params(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
