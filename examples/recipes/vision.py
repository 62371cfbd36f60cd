"""Train a vision model in bfloat16, and judge its average over time (EMA) beside it.

torchrun --nproc-per-node 2 examples/recipes/vision.py
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import sherd

SIZE, CHANNELS, SHAPES = 16, 1, 4


def own_images(num: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of `num` noisy shapes, float32 (part, 1, SIZE, SIZE), and their kinds, int64 (part).

    Your data go here: a DataLoader over torchvision's ImageFolder, with a DistributedSampler.
    """
    draw = torch.Generator().manual_seed(step)
    kinds = torch.randint(SHAPES, (num,), generator=draw)
    middle = torch.rand(num, 2, 1, 1, generator=draw) * SIZE / 2 + SIZE / 4
    y, x = (torch.arange(SIZE).float().view(shape) for shape in ((1, SIZE, 1), (1, 1, SIZE)))
    y, x = (y - middle[:, 0]).abs(), (x - middle[:, 1]).abs()
    drawn = torch.stack([y + x < 5, y.maximum(x) < 4, (y * y + x * x).sqrt().sub(4).abs() < 1, y.minimum(x) < 1], 1)
    images = drawn[torch.arange(num), kinds] + 0.3 * torch.randn(num, SIZE, SIZE, generator=draw)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    part = slice(rank * num // num_ranks, (rank + 1) * num // num_ranks)
    return images[part, None], kinds[part]


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, transformer layers, the mean over patches."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(CHANNELS, width, kernel_size=4, stride=4)
        self.place = nn.Parameter(torch.randn((SIZE // 4) ** 2, width) * 0.02)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, norm_first=True, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SHAPES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="images of a step, over all ranks")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--float32", action="store_true", help="compute in float32, not in bfloat16")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = ViT(args.width, args.layers)
    # Parameters are gathered and used in bfloat16; gradients are added up, and the optimizer steps, in float32.
    compute = None if args.float32 else torch.bfloat16
    sherd.auto_shard(model, mp_policy=sherd.MixedPrecisionPolicy(compute, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # Each rank averages its own shards. The first averages forget fast, the later ones slowly.
    ema = sherd.Ema(model, lambda updates: min(0.98, (1 + updates) / (10 + updates)))
    device, rank, num_ranks = next(model.parameters()).device, dist.get_rank(), dist.get_world_size()

    def loss_of(num: int, step: int) -> torch.Tensor:
        images, kinds = own_images(num, step)
        return cross_entropy(model(images.to(device)).float(), kinds.to(device))

    @torch.no_grad()
    def judged() -> float:
        """The loss on held-out images, over all ranks."""
        dist.all_reduce(loss := loss_of(256, step=0) / num_ranks)
        return loss.item()

    for step in range(1, args.steps + 1):
        loss_of(args.batch, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        if step % 20 == 0:
            own = judged()
            with ema.applied():  # the averages stand in for the parameters
                averaged = judged()
            if rank == 0:
                print(f"step {step:4d}  loss {own:.3f}  averaged loss {averaged:.3f}", flush=True)

    memory = sherd.memory_report(model, optimizer)
    kept = sum(row.now for row in memory.rows if row.kind in ("shards", "optimizer state")) / 2**20
    averages = sum(each.to_local().nbytes for each in ema.state_dict()["averages"].values()) / 2**20
    if rank == 0:
        print(f"rank 0 keeps {kept:.2f} MiB of shards and optimizer state, and {averages:.2f} MiB of averages")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
