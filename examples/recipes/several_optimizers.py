"""Several optimizers: Muon steps hidden matrices, AdamW the rest in two groups, each on a schedule of its own.

torchrun --nproc-per-node 2 examples/recipes/several_optimizers.py
"""

import argparse
from functools import partial
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

import sherd

ARGUMENTS = {"steps": 60, "batch": 16, "context": 64, "width": 64, "layers": 2, "heads": 4}
ARGUMENTS |= {"lr": 0.02, "adamw_lr": 3e-3, "warmup": 10}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        x = x + self.out(scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def optimizers_of(model: nn.Sequential, args: argparse.Namespace) -> dict[str, torch.optim.Optimizer]:
    """Each parameter is in one of them: a matrix of a block, a vector, or an embedding or head."""
    matrices = [each for block in model[1:-2] for each in block.parameters() if each.ndim == 2]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    ends = [model[0].weight, model[-1].weight]
    decayed, free = {"params": ends, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}
    adamw = torch.optim.AdamW([decayed, free], lr=args.adamw_lr, betas=(0.9, 0.95))
    return {"muon": sherd.Muon(matrices, lr=args.lr, weight_decay=0.01), "adamw": sherd.flatten_optimizer(adamw)}


def rate(name: str, args: argparse.Namespace, step: int) -> float:
    """A part of the highest rate: AdamW's falls after the warm-up, Muon's in the last third of the steps."""
    warm, left = min(1.0, (step + 1) / args.warmup), 1 - step / (args.steps + 1)
    return min(warm, 3 * left) if name == "muon" else warm * left


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual. A token is a byte of it")
    parser.add_argument("--out", type=Path, help="a folder for a checkpoint at the end")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    blocks = [Block(args.width, args.heads) for _ in range(args.layers)]
    ends = nn.Embedding(256, args.width), nn.LayerNorm(args.width), nn.Linear(args.width, 256, bias=False)
    model = nn.Sequential(ends[0], *blocks, *ends[1:])
    for unit in (*blocks, model):
        sherd.fully_shard(unit, comm_policy=sherd.CommPolicy(divergence="join"))  # for sherd.step
    device, rank, world = model[0].weight.device, dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch}: expected a multiple of the {world} ranks")
    optimizers = optimizers_of(model, args)
    schedules = {f"{name}_rate": LambdaLR(each, partial(rate, name, args)) for name, each in optimizers.items()}
    items = {"model": model, **optimizers, **schedules}

    text = torch.tensor(list(args.data.read_bytes() if args.data else "".join(topics.topics.values()).encode()))
    for step in range(args.steps + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(world)[rank]  # this rank's part of the batch
        tokens = text[own + torch.arange(args.context + 1)].to(device)
        with sherd.step(model, list(optimizers.values())) as attempt:  # both step, or none on any rank
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            attempt.agree()  # before clipping, which all ranks do together
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers.values():
                optimizer.step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        rates = {name: schedule.get_last_lr()[0] for name, schedule in schedules.items()}
        for schedule in schedules.values():
            schedule.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0 and step % 10 == 0:
            print(
                f"step {step:3}  loss {mean:.3f}",
                *(f" {name} {value:.4f}" for name, value in rates.items()),
                flush=True,
            )
    if args.out:
        sherd.save(args.out, items, step=args.steps)
    if rank == 0:
        print(optimizers["muon"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
