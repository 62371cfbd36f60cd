"""The same bits on any number of ranks: the sums of gradients are made in one order of all batches of a step.

torchrun --nproc-per-node 2 examples/reproducible.py
torchrun --nproc-per-node 1 examples/reproducible.py    # prints the same digest
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

import sherd

BATCHES = 4  # of a step, on all ranks together


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number` of a step: the same samples on any number of ranks."""
    data = torch.Generator().manual_seed(BATCHES * step + number)
    x = torch.randn(16, 32, generator=data)
    return x, x.sum(dim=1, keepdim=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 1))
    policy = sherd.CommPolicy.reproducible()
    for unit in (*model, model):
        sherd.fully_shard(unit, comm_policy=policy)
    # The default, fused, rounds the ends of shards otherwise.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    for step in range(20):
        with sherd.accumulate(model, BATCHES // ranks, average=True):
            for turn in range(BATCHES // ranks):
                x, wanted = batch(step, turn * ranks + rank)
                (model(x) - wanted).square().mean().backward()
        norm = sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(parameter.full_tensor().detach().view(torch.uint8).flatten().tolist()))
    if rank == 0:
        print(f"{ranks} ranks  norm {norm.item():.9g}  digest of all parameters {digest.hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
