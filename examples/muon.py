"""Does a training by Muon go on under another layout? Two ranks begin it, and one rank ends it with whole matrices.

torchrun --nproc-per-node 2 examples/muon.py
"""

import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import CosineAnnealingLR

import sherd

WIDTH, HEADS, WORDS, STEPS = 32, 4, 50, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        seen = scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def make(placement: sherd.Owned | None) -> dict[str, Any]:
    """A small GPT, one unit per block; NorMuon for each head of `qkv` and for other matrices; a falling rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH))
    model.add_module("head", nn.Linear(WIDTH, WORDS, bias=False))
    for unit in (model[1], model[2], model):
        sherd.fully_shard(unit, placement=placement)
    optimizer = sherd.Muon(model, lr=0.02, beta2=0.95, heads={"qkv.weight": 3 * HEADS}, adamw={"lr": 1e-2})
    return {"model": model, "optimizer": optimizer, "schedule": CosineAnnealingLR(optimizer, STEPS)}


def train(model: nn.Module, optimizer: sherd.Muon, schedule: CosineAnnealingLR, steps: range) -> float:
    """Train on texts that count, the same on every rank; the last loss."""
    for step in steps:
        texts = (torch.arange(8)[:, None] * 5 + torch.arange(17) * (step % 3 + 1)) % WORDS
        loss = cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), STEPS // 2
    folder = os.path.join(tempfile.gettempdir(), f"sherd-{os.environ['MASTER_PORT']}")  # one for all ranks
    made = make(placement=None)  # torch's Shard(0)
    plan, saved = repr(made["optimizer"]), train(**made, steps=range(half))
    sherd.save(folder, made, step=half)
    ended = train(**made, steps=range(half, STEPS))
    dist.destroy_process_group()
    if rank == 0:
        print(f"{plan}\n2 ranks saved at     loss {saved:.6f}, and ended at loss {ended:.6f}")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the next job, with one rank
        sherd.load(folder, made := make(placement=sherd.Owned()))
        print(f"1 rank went on, and ended at loss {train(**made, steps=range(half, STEPS)):.6f}")
        shutil.rmtree(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
