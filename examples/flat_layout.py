"""Copy less: unsharded parameters are views of what was gathered, and the optimizer steps whole buffers.

The default cuts every tensor on its first dim; Flat cuts one line of all of them. Both train the same model.

    torchrun --nproc-per-node 2 examples/flat_layout.py
"""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn

from sherd import Flat, flatten_optimizer, fully_shard, memory_report


class Block(nn.Module):
    """Four small tensors. Of many such blocks an optimizer would rather see a few long vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def sharded(plain: nn.Sequential, placement: Flat | None) -> nn.Sequential:
    """A sharded copy of `plain`, a unit for every four blocks; placement None is the default, `Shard(0)`."""
    model = copy.deepcopy(plain)
    for first in range(0, 40, 4):
        fully_shard(list(model[first : first + 4]), placement=placement)
    fully_shard(model, placement=placement)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Ten steps; the last loss, and how long the optimizer took for a step, in milliseconds."""
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    times = []
    for _ in range(10):
        x = torch.randn(16, 30, generator=data)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return loss.item(), 1e3 * min(times)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(30) for _ in range(40)), nn.Linear(30, 1))
    losses = []
    for placement in (None, Flat()):
        model = sharded(plain, placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if placement is not None:
            optimizer = flatten_optimizer(optimizer)  # the same optimizer to whoever looks at it
        loss, step_ms = train(model, optimizer)
        losses.append(loss)
        if rank == 0:
            print(f"{placement or 'Shard(0)'!s:8}  loss {loss:.6f}  optimizer step {step_ms:.2f} ms")
    weight = model[0].linear.weight
    print(f"rank {rank} holds {weight.to_local().numel()} of the {weight.numel()} elements of the first weight")
    if rank == 0:
        print(memory_report(model, optimizer))  # the table is of this rank
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
