"""How is an FSDP2 program ported? One import changes; everything else stays as it was.

torchrun --nproc-per-node 2 examples/port_from_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn

# Was: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from sherd import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """A residual two-layer perceptron on vectors of `width` floats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1))

    # Bottom up: each block is a unit, gathered and freed on its own; the root takes what is left.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[:-1]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    # After sharding, so that it holds this rank's shards and states for them only.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    mine = sum(param.to_local().numel() for param in model.parameters())
    everyones = sum(param.numel() for param in model.parameters())
    print(f"rank {rank} of {num_ranks} holds {mine} of {everyones} parameters")

    data = torch.Generator().manual_seed(1 + rank)  # each rank sees data of its own
    for step in range(31):
        x = torch.randn(32, 64, generator=data)
        target = x[:, :8].sum(dim=1, keepdim=True)
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item() / num_ranks:.3f}  gradient norm {norm.item():.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
