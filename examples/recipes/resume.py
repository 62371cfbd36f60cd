"""Resume on another number of ranks: the same losses, to rounding, as a run that nothing has broken.

    torchrun --nproc-per-node 2 examples/recipes/resume.py --out run --stop 30
    torchrun --nproc-per-node 3 examples/recipes/resume.py --out run

Start it again as often as you like, after a kill too: it goes on at the last step that was saved.
"""

import argparse
import math
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

import sherd

ARGUMENTS = {"steps": 60, "save_every": 10, "batch": 12, "context": 64, "width": 64, "layers": 2, "heads": 4}


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


def built(args: argparse.Namespace) -> nn.Sequential:
    """The sharded model. What matters for the losses is the same for any number of ranks: weights, batches, order."""
    torch.manual_seed(0)
    blocks = [Block(args.width, args.heads) for _ in range(args.layers)]
    ends = nn.LayerNorm(args.width), nn.Linear(args.width, 256, bias=False)
    model = nn.Sequential(nn.Embedding(256, args.width), *blocks, *ends)
    for unit in (*blocks, model):
        sherd.fully_shard(unit)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual. A token is a byte of it")
    parser.add_argument("--out", default="run", help="a folder that all ranks share, or a URL as s3://bucket/run")
    parser.add_argument("--stop", type=int, help="leave after this step, as if the time were up")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate, from this start on")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    model = built(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def falling(step: int) -> float:
        return (1 + math.cos(math.pi * step / (args.steps + 1))) / 2

    schedule = LambdaLR(optimizer, falling)
    rank, world, device = dist.get_rank(), dist.get_world_size(), model[0].weight.device
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch}: expected a multiple of the {world} ranks")
    items = {"model": model, "optimizer": optimizer, "schedule": schedule, "ranks": world}
    try:
        restored = sherd.load(args.out, items)
        first = restored.step + 1
        schedule.base_lrs = [args.lr]  # not the saved one, for the steps to come and for the next
        optimizer.param_groups[0]["lr"] = args.lr * falling(first)
        if rank == 0:
            print(f"{world} ranks go on after step {restored.step}, which {restored.values['ranks']} ranks saved")
    except sherd.errors.NoCheckpointError:
        first = 0

    text = torch.tensor(list(args.data.read_bytes() if args.data else "".join(topics.topics.values()).encode()))
    last, saving = args.stop or args.steps, None
    for step in range(first, last + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(world)[rank]  # this rank's part of the batch
        tokens = text[own + torch.arange(args.context + 1)].to(device)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % args.save_every == 0 or step == last:
            saving = sherd.async_save(args.out, items, step=step, keep_last=2)  # which the next save waits for
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                print(f"step {step:3}  loss {mean:.4f}", flush=True)
    if saving is not None:
        saving.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
