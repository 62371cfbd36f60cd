"""A feed-forward layer of many experts: which of them a token goes to, and what keeps their shares even.

After Fedus, Zoph and Shazeer, "Switch Transformers" (2021), with several experts per token and without a capacity: no
token is dropped. Tokens are sorted by expert, so that each expert has one matrix product:

    token        0    1    2             by expert   0: 0 2   1: 1   2: 0 1 2
    experts     0 2  1 2  0 2            rows        0 2 | 1 | 0 1 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from sherd.train.config import ModelConfig
from sherd.train.sequence import WholeSequence

__all__ = ["Experts", "MixtureOfExperts", "Router", "ToExperts", "exchanged", "imbalance", "stay"]

Way = Callable[[Tensor], Tensor]


class Router(nn.Module):
    """Tokens, [samples, length, width], to each expert's probability, float32 [samples, length, experts]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.experts, model.width))

    def forward(self, x: Tensor) -> Tensor:
        # In float32 at any precision: rounding would send tokens to other experts.
        return F.linear(x.float(), _local(self.weight).float()).softmax(-1)


def stay(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Way]:
    """Where rows go while all experts are on this rank: nowhere. `exchange.ToExperts` is for several ranks."""
    return rows, counts, lambda rows: rows


class Experts(nn.Module):
    """SwiGLU layers side by side: the weights are [experts, out, in]. One expert's is the dense layer of `models`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(model.experts, model.hidden, model.width))
        self.up = nn.Parameter(torch.empty(model.experts, model.hidden, model.width))
        self.down = nn.Parameter(torch.empty(model.experts, model.width, model.hidden))
        self.exchange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Way]] = stay

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert.

        Args:
            rows: [rows, width], the rows of expert 0 first, then those of expert 1, ...
            counts: int64 [experts], how many rows each has.
        """
        rows, counts, back = self.exchange(rows, counts)
        # Unbound at once: taken one by one, each expert's gradient would be as large as that of all.
        weights = (_local(each).unbind() for each in (self.gate, self.up, self.down))
        parts = rows.split(counts.tolist())  # on an accelerator it waits here for the router
        done = [
            F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            for x, gate, up, down in zip(parts, *weights, strict=True)
        ]
        return back(torch.cat(done))


class MixtureOfExperts(nn.Module):
    """Each token's sum over its `top_k` likeliest experts, weighted by their probabilities.

    While it trains, the loss that keeps the experts' shares even is added to whatever loss is made of its output,
    `balance` times; parallel training sets that to a rank's and micro-batch's part.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.balance = model.top_k, model.balance
        self.router = Router(model)
        self.experts = Experts(model)
        self.sequence = WholeSequence()

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        rows = x.flatten(0, 1)[order // self.top_k]
        rows = self.experts(rows, chosen.flatten().bincount(minlength=probabilities.shape[-1]))
        by_token = rows[order.argsort()].view(*chosen.shape, -1)
        out: Tensor = (by_token * weights.unsqueeze(-1)).sum(-2).to(x.dtype)
        if self.training and self.balance:
            return _joined(out, self.balance * imbalance(probabilities, chosen, self.sequence))
        return out


def imbalance(probabilities: Tensor, chosen: Tensor, sequence: WholeSequence) -> Tensor:
    """The loss of Switch Transformers, equation 4, of each sample by itself, then the mean over samples.

    It is the number of experts times the sum over experts of a sample's share of tokens times its mean probability: 1
    when the shares are even. Taken per sample it does not depend on which samples are computed together, so neither on
    micro-batches nor on ranks.

    Args:
        probabilities: [samples, length, experts].
        chosen: int64 [samples, length, top_k].
        sequence: which other ranks have tokens of the same samples; theirs count for the shares. The mean of what
            ranks return is the whole.
    """
    num_samples, _, num_experts = probabilities.shape
    counts = probabilities.new_zeros(num_samples, num_experts)
    counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen.flatten(1), dtype=counts.dtype))
    shares = sequence.mean(counts / counts.sum(1, keepdim=True))
    return num_experts * (shares * probabilities.mean(1)).sum(1).mean()


def _joined(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, through which `loss` gets a gradient of 1 as soon as `x` gets its own.

    A loss that were returned beside the output would have to be carried past every module and pipeline stage above.
    """
    joined: Tensor = _Joined.apply(x, loss)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def _local(weight: Tensor) -> Tensor:
    """Returns this rank's part of it. Where others have the same, each gives it the gradient of its own tokens."""
    if not isinstance(weight, DTensor):
        return weight
    parts = [Partial() if each.is_replicate() else each for each in weight.placements]
    return weight.to_local(grad_placements=parts)


# The way of tokens to experts on other ranks, and back


class ToExperts:
    """Rows go to the ranks of their experts, and back: an `Experts.exchange`.

    Rank r of `ep` has the r-th part of the experts; every rank sends each other one the rows for it.
    """

    def __init__(self, ep: DeviceMesh) -> None:
        self._group, self._num_ranks = ep.get_group(), ep.size()

    def __call__(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Way]:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        # Of each rank and each of the experts here: [ranks, experts]; rows arrive in this order.
        theirs = theirs.view(self._num_ranks, -1)
        sent, received = counts.view(self._num_ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = exchanged(rows, sent, received, self._group)
        num_experts = theirs.shape[1]
        expert = torch.arange(num_experts, device=rows.device).repeat(self._num_ranks)
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        back = order.argsort()
        return (
            arrived[order],
            theirs.sum(0),
            lambda done: exchanged(done[back], received, sent, self._group),
        )


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to other ranks and from them; gradients go the way back.

    `sent[r]` of the rows, in order, go to rank r, and `received[r]` come from it.
    """
    arrived: Tensor = _Exchanged.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.way_back), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
