"""Long context: the ranks of a mesh axis share each sample's tokens, and see all of them in attention.

    torchrun --nproc-per-node 2 examples/recipes/long_context.py

torch's `context_parallel` cuts tensors by tokens, and makes attention a ring on CUDA; on a CPU it has no ring, and keys
and values are gathered.
"""

import argparse
import os
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as own_attention  # context_parallel changes that in F

import sherd

WORLD = int(os.environ.get("WORLD_SIZE", 1))
ARGUMENTS = {"steps": 60, "batch": 4, "context": 256, "width": 64, "layers": 2, "heads": 4, "lr": 3e-3, "cp": WORLD}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, cp: DeviceMesh) -> None:
        super().__init__()
        self.heads, self.cp = heads, cp
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        x = x + self.out(self.attention(*heads.chunk(3, dim=1), places).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Causal, of this rank's tokens; tensors are [batch, heads, tokens, width], `places` where tokens stand."""
        if query.is_cuda:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        key, value, everyones = self.gathered(key, 2), self.gathered(value, 2), self.gathered(places, 0)
        return own_attention(query, key, value, attn_mask=everyones <= places[:, None])

    def gathered(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' tokens; backward adds up all ranks' gradients of those of this rank."""
        return DTensor.from_local(own, self.cp, [Shard(dim)]).full_tensor(grad_placements=[Partial()])


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace, cp: DeviceMesh) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, cp) for _ in range(args.layers))
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, 256))

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, places)
        return self.head(x)


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (WORLD // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = Decoder(args, mesh["cp"]).to(device)
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit)  # over all ranks: those of `cp` too have different tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = torch.tensor(list(args.data.read_bytes() if args.data else "".join(topics.topics.values()).encode()))
    for step in range(args.steps + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(WORLD // args.cp)[mesh.get_local_rank("dp")]  # this rank's samples
        places = torch.arange(args.context, device=device)
        inputs, targets = (text[own + shift + places.cpu()].to(device) for shift in (0, 1))
        with context_parallel(mesh["cp"], buffers=[inputs, targets, places], buffer_seq_dims=[1, 1, 0]):
            # Here they are this rank's tokens of the samples.
            loss = F.cross_entropy(model(inputs, places).flatten(0, 1), targets.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / WORLD)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {mean:.3f}", flush=True)
    if dist.get_rank() == 0:
        kept = sum(row.now for row in sherd.memory_report(model, optimizer).rows if row.kind != "transport") / 2**20
        print(f"rank 0 has {args.context // args.cp} of {args.context} tokens, and keeps {kept:.2f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual. A token is a byte of it")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if WORLD % args.cp or args.batch % (WORLD // args.cp) or args.context % (2 * args.cp):
        parser.error(f"--cp must divide {WORLD} ranks, {WORLD} / cp the batch, and 2 cp the context")
    main(args)
