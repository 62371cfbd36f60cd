"""Do shards stay one parameter when ranks use different parameters of a unit?"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard


class Either(nn.Module):
    """Rank 0 uses `left`, the others `right`; nobody uses `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.left(x) if rank == 0 else self.right(x)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def built() -> Either:
    torch.manual_seed(7)
    return Either()


def gradients_when_ranks_differ() -> dict[str, torch.Tensor | None]:
    model = built()
    fully_shard(model)
    rank = dist.get_rank()
    model(inputs(rank), rank).sum().backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_rank_without_a_gradient_takes_its_part_of_the_others(world):
    ranks = world(3).run(gradients_when_ranks_differ)
    plain = built()
    (sum(plain(inputs(rank), rank).sum() for rank in range(3)) / 3).backward()
    for found in ranks:
        for name, parameter in plain.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, f"{name} has a gradient that nobody made"
            else:
                torch.testing.assert_close(found[name], parameter.grad)
