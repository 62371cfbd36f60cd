"""Can a checkpoint be read by another number of ranks? It is saved by all of them here and read by one.

torchrun --nproc-per-node 2 examples/save_and_reload.py
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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


def save(folder: str) -> None:
    """Each rank writes its own shards of the parameters and of the optimizer's moments."""
    model, optimizer = make(seed=0)
    train(model, optimizer, range(10))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    loss = train(model, optimizer, range(10, 20))  # what a reader that goes on should reach
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks saved step 10 and went on: loss {loss:.6f} at step 20")


def reload(folder: str) -> None:
    """Any number of ranks: a model with other weights says which shards it wants, and gets them."""
    model, optimizer = make(seed=1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loss = train(model, optimizer, range(10, 20))
    print(f"{dist.get_world_size()} rank read it and went on:          loss {loss:.6f} at step 20")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    save(folders[0])
    dist.destroy_process_group()
    if rank == 0:  # the next job, with one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        reload(folders[0])
        print(f"the checkpoint was {', '.join(sorted(os.listdir(folders[0])))}")
        shutil.rmtree(folders[0])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
