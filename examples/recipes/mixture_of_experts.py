"""A mixture of experts: each rank has some of the experts, and tokens travel to them and back.

torchrun --nproc-per-node 2 examples/recipes/mixture_of_experts.py
"""

import argparse
import os
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu, one_hot, scaled_dot_product_attention

import sherd

WORLD = int(os.environ.get("WORLD_SIZE", 1))
ARGUMENTS = {"steps": 60, "batch": 16, "context": 64, "width": 64, "layers": 2, "heads": 4, "lr": 3e-3}
ARGUMENTS |= {"experts": 4, "top_k": 2, "balance": 0.01, "ep": WORLD}


class Experts(nn.Module):
    """Feed-forward layers side by side. A rank of `ep` has an equal part of them."""

    def __init__(self, number: int, width: int, ep: DeviceMesh) -> None:
        super().__init__()
        self.number, self.ep = number, ep
        for name, shape in (("up", (number, width, 2 * width)), ("down", (number, 2 * width, width))):
            drawn = torch.randn(shape) * shape[1] ** -0.5
            self.register_parameter(name, nn.Parameter(distribute_tensor(drawn, ep, [Shard(0)])))

    def forward(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Each row, [rows, width], through the expert of its number, int64 [rows]."""
        order, counts = expert.argsort(stable=True), expert.bincount(minlength=self.number).view(self.ep.size(), -1)
        theirs = torch.empty_like(counts)  # how many rows come from each rank for each of the experts here
        dist.all_to_all_single(theirs, counts, group=self.ep.get_group())
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows[order], received, sent, self.ep)  # by rank, then by expert
        here = torch.arange(theirs.shape[1], device=rows.device).repeat(len(theirs)).repeat_interleave(theirs.flatten())
        by_expert = here.argsort(stable=True)
        parts = arrived[by_expert].split(theirs.sum(0).tolist())
        weights = self.up.to_local(), self.down.to_local()
        done = torch.cat([gelu(part @ up) @ down for part, up, down in zip(parts, *weights, strict=True)])
        return all_to_all_single_autograd(done[by_expert.argsort()], sent, received, self.ep)[order.argsort()]


class Block(nn.Module):
    def __init__(self, width: int, args: argparse.Namespace, ep: DeviceMesh) -> None:
        super().__init__()
        self.heads, self.top_k = args.heads, args.top_k
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.router, self.experts = nn.Linear(width, args.experts, bias=False), Experts(args.experts, width, ep)

    def forward(self, x: torch.Tensor, uneven: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to `uneven` 1 where experts have even shares of a sample's tokens, else more (Fedus et al. 2021)."""
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        x = x + self.out(scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True).transpose(1, 2).flatten(2))
        probabilities = self.router(rows := self.norm2(x)).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        done = self.experts(rows.flatten(0, 1).repeat_interleave(self.top_k, dim=0), chosen.flatten())
        shares = one_hot(chosen, probabilities.shape[-1]).float().mean((1, 2))
        uneven = uneven + probabilities.shape[-1] * (shares * probabilities.mean(1)).sum(1).mean()
        return x + (done.view(*chosen.shape, -1) * weights[..., None]).sum(2), uneven


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace, ep: DeviceMesh) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args, ep) for _ in range(args.layers))
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, 256))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, uneven = self.tokens(tokens) + self.places.weight, torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, uneven = block(x, uneven)
        return self.head(x), uneven / len(self.blocks)


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (WORLD // args.ep, args.ep), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)  # the same weights on every rank, before they are divided and sharded
    model = Decoder(args, mesh["ep"]).to(device)
    for unit in (*model.blocks, model):  # experts, which alone are stacked matrices, over `edp`; the rest over all
        sherd.fully_shard(unit, shard_placement_fn=lambda each: sherd.OnMesh(mesh["edp"]) if each.dim() == 3 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = torch.tensor(list(args.data.read_bytes() if args.data else "".join(topics.topics.values()).encode()))
    for step in range(args.steps + 1):
        starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step))
        own = starts.chunk(WORLD)[dist.get_rank()]  # this rank's part of the batch
        tokens = text[own + torch.arange(args.context + 1)].to(device)
        logits, uneven = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + args.balance * uneven).backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)  # one norm over both meshes
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := torch.stack([loss.detach(), uneven.detach()]) / WORLD)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {mean[0]:.3f}  unevenness {mean[1]:.3f}", flush=True)
    if dist.get_rank() == 0:
        kept = sum(row.now for row in sherd.memory_report(model, optimizer).rows if row.kind != "transport") / 2**20
        print(f"rank 0 has {args.experts // args.ep} of {args.experts} experts, and keeps {kept:.2f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual. A token is a byte of it")
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    main(parser.parse_args())
