"""The places of a sample's tokens: all on this rank, or in equal parts on several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sherd._torch import all_gather_single, reduce_scatter_single

__all__ = ["CutSequence", "WholeSequence"]


class WholeSequence:
    """All tokens are here."""

    def span(self, length: int) -> range:
        """Returns the positions in the sample of this rank's tokens in attention; other layers see `length` tokens."""
        return range(length)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the causal attention of this rank's tokens, of the shape of `query`.

        Arguments are [samples, heads, length, width]; keys and values may have fewer heads.
        """
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    def mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over the ranks that have tokens of these samples. It has no gradient."""
        return x


class CutSequence(WholeSequence):
    """Rank r of `cp` has the r-th part of each sample; keys and values of all are gathered for attention.

    Args:
        cp: the axis that attention gathers over; None where only other layers see parts.
        tp: the axis that cuts those parts once more for other layers; None for attention itself.
    """

    def __init__(self, cp: DeviceMesh | None, tp: DeviceMesh | None) -> None:
        self._rank = 0 if cp is None else cp.get_local_rank()
        self._num_parts = 1 if tp is None else tp.size()
        self._attention = None if cp is None else cp.get_group()
        self._groups = [axis.get_group() for axis in (cp, tp) if axis is not None]

    def span(self, length: int) -> range:
        length *= self._num_parts
        return range(self._rank * length, (self._rank + 1) * length)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._attention is None:
            return super().attend(query, key, value)
        own = self.span(query.shape[2])
        # Later tokens are never looked at: ranks in front have less to do.
        key, value = _gathered(torch.stack((key, value)), self._attention)[..., : own.stop, :]
        seen = torch.ones(len(own), own.stop, dtype=torch.bool, device=query.device).tril(own.start)
        return F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=query.shape[1] != key.shape[1])

    def mean(self, x: Tensor) -> Tensor:
        for group in self._groups:
            x = x / group.size()
            dist.all_reduce(x, group=group)
        return x


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns all ranks' parts of the last dim but one, in order. Backward sums the gradients of each part."""
    whole: Tensor = _Gathered.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = part.new_empty(group.size(), *part.shape)
        all_gather_single(parts.view(-1), part.contiguous().view(-1), group=group)
        return parts.movedim(0, -3).flatten(-3, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.unflatten(-2, (ctx.group.size(), -1)).movedim(-3, 0).contiguous()
        part = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(part.view(-1), parts.view(-1), group=ctx.group)
        return part, None
