"""The way of tokens to experts on other ranks, and back.

Two ranks, two experts on each; rows come sorted by expert, and are sorted again where they arrive:

    rank 0 has    0 0 1 3        rank 0 gets   0 0 1 | 1 1    and computes    0 0 | 1 1 1
    rank 1 has    1 1 2          rank 1 gets   3 | 2          and computes    2 | 3
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sherd.train.experts import Way

__all__ = ["ToExperts", "exchanged"]


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
