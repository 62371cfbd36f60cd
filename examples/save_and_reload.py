"""Can a checkpoint be read by another number of ranks? It is saved by all of them here and read by one.

torchrun --nproc-per-node 2 examples/save_and_reload.py
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd import fully_shard


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, its weights drawn from `seed`, and its optimizer."""
    torch.manual_seed(seed)
    # 101 rows: a size that no two numbers of ranks cut alike.
    model = nn.Sequential(nn.Linear(32, 101), nn.GELU(), nn.Linear(101, 32))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Train on batches that depend on the step alone, the same on every rank; the last loss."""
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save(folder: Path) -> None:
    """Each rank writes its own shards of the parameters and of the optimizer's moments."""
    model, optimizer = make(seed=0)
    train(model, optimizer, range(10))
    sherd.save(folder, {"model": model, "optimizer": optimizer}, step=10)
    loss = train(model, optimizer, range(10, 20))  # what a reader that goes on should reach
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks saved step 10 and went on: loss {loss:.6f} at step 20")


def reload(folder: Path) -> None:
    """Any number of ranks: a model with other weights reads the slices that its own shards need."""
    model, optimizer = make(seed=1)
    restored = sherd.load(folder, {"model": model, "optimizer": optimizer})
    loss = train(model, optimizer, range(restored.step, 20))
    print(f"{dist.get_world_size()} rank read it and went on:          loss {loss:.6f} at step 20")
    print(f"the checkpoint was {', '.join(sorted(os.listdir(restored.path)))}")


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = (
        dist.get_rank(),
        Path(tempfile.gettempdir(), f"sherd-{os.environ['MASTER_PORT']}"),
    )  # one for all ranks
    save(folder)
    dist.destroy_process_group()
    if rank == 0:  # the next job, with one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        reload(folder)
        shutil.rmtree(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
