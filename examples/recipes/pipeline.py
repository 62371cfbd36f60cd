"""A pipeline: each rank of a mesh axis has some of the layers, and micro-batches pass from one to the next.

torchrun --nproc-per-node 2 examples/recipes/pipeline.py
"""

import argparse
import os
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import sherd
from sherd.interop.pipelining import PipelineStage

WORLD = int(os.environ.get("WORLD_SIZE", 1))
ARGUMENTS = {"steps": 60, "batch": 16, "context": 64, "width": 64, "layers": 4, "heads": 4, "lr": 3e-3}
ARGUMENTS |= {"micro_batches": 4, "pp": WORLD}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        x = x + self.out(scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """The `number`-th of `count` equal parts of a decoder: the first reads tokens, the last returns logits."""

    def __init__(self, args: argparse.Namespace, number: int, count: int) -> None:
        super().__init__()
        first, end = (each * args.layers // count for each in (number, number + 1))
        tokens, places = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        blocks = {str(each): Block(args.width, args.heads) for each in range(args.layers)}
        head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, 256))
        if number == 0:
            self.tokens, self.places = tokens, places
        # Each block by its number in the decoder: so a checkpoint does not depend on the number of stages.
        self.blocks = nn.ModuleDict({each: block for each, block in blocks.items() if first <= int(each) < end})
        if number == count - 1:
            self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places.weight
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args: argparse.Namespace) -> None:
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (args.pp, WORLD // args.pp), mesh_dim_names=("pp", "dp"))
    number, pipe = mesh.get_local_rank("pp"), mesh.get_group("pp")
    torch.manual_seed(0)  # every rank draws the same decoder, and keeps its part
    model = Stage(args, number, args.pp).to(device)
    for unit in (*model.blocks.values(), model):
        sherd.fully_shard(unit, mesh=mesh["dp"])  # over the ranks that have the same layers
    stage = PipelineStage(model, number, args.pp, device, group=pipe)
    schedule = Schedule1F1B(
        stage,
        args.micro_batches,
        loss_fn=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = torch.tensor(list(args.data.read_bytes() if args.data else "".join(topics.topics.values()).encode()))
    for step in range(args.steps + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(WORLD // args.pp)[mesh.get_local_rank("dp")]  # this pipeline's part of the batch
        tokens = text[own + torch.arange(args.context + 1)].to(device)
        losses: list[torch.Tensor] = []  # of the micro-batches, on the last stage
        inputs = (tokens[:, :-1],) if number == 0 else ()
        last = {"target": tokens[:, 1:], "losses": losses} if number == args.pp - 1 else {}
        schedule.step(*inputs, **last, return_outputs=False)
        sherd.clip_grad_norm_(model.parameters(), 1.0, extra_groups=[pipe])  # one norm over all stages
        optimizer.step()
        optimizer.zero_grad()
        mean = sum((each.detach() for each in losses), torch.zeros((), device=device)) / args.micro_batches
        dist.all_reduce(mean := mean * args.pp / WORLD)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {mean:.3f}", flush=True)
    if dist.get_rank() == 0:
        kept = sum(row.now for row in sherd.memory_report(model, optimizer).rows if row.kind != "transport") / 2**20
        print(f"rank 0 has {len(model.blocks)} of {args.layers} blocks, and keeps {kept:.2f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual. A token is a byte of it")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if WORLD % args.pp or args.layers < args.pp or args.batch % (WORLD // args.pp * args.micro_batches):
        parser.error(f"--pp must divide {WORLD} ranks, and {WORLD} / pp times the micro-batches the batch")
    main(args)
