"""A block with routed experts, on an expert axis and on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.models import WIDTH, noise

NUM_EXPERTS = 4


class _FromAll(torch.autograd.Function):
    """Every rank's tensor, stacked; backward sums what all ranks have for one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


class Experts(nn.Module):
    """Stacked weights, [experts, WIDTH, WIDTH]. A token, [WIDTH], has one expert, by its first element.

    `group`: over its ranks the experts are divided, and tokens go to where theirs is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 3)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if self.group is None:
            return self._of(x, weight, 0)
        all_x = _FromAll.apply(x, self.group)
        results = _FromAll.apply(self._of(all_x, weight, self.group.rank() * len(weight)), self.group)
        return results[:, self.group.rank()].sum(0)  # what all ranks have for this one

    def _of(self, x: Tensor, weight: Tensor, first: int) -> Tensor:
        chosen = (x[..., 0].abs() * 97).long() % NUM_EXPERTS - first
        return sum((chosen == at)[..., None] * torch.tanh(x @ each) for at, each in enumerate(weight.unbind()))


class Routed(nn.Module):
    """A dense layer, experts, and a gain that nobody shards."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.dense(x))) * self.gain


def built() -> Routed:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Routed()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss on one rank's batch."""
    return (model(noise(step, rank, 6, WIDTH)) - 0.5).square().mean()


def divide_experts(model: Routed, mesh: DeviceMesh, as_dtensor: bool) -> None:
    """Each rank of `mesh` keeps its part of the experts, as a plain tensor or as a DTensor."""
    experts, rank = model.experts, mesh.get_local_rank()
    part = experts.weight.detach().chunk(mesh.size())[rank].clone()
    experts.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]) if as_dtensor else part)
    experts.group = mesh.get_group()
