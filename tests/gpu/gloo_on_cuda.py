"""What gloo does with CUDA tensors, found out by asking: ranks that share one GPU have no other backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sherd._torch import all_gather_single, reduce_scatter_single
from tests.gpu.devices import here


def refused_by_gloo() -> dict[str, str]:
    """On one of two ranks: returns which collectives on CUDA tensors gloo refuses or gets wrong, with what it said."""
    device, rank = here().device, dist.get_rank()
    mine = torch.full((2,), float(rank + 1), device=device)

    def single_gather() -> bool:
        rows = torch.zeros(4, device=device)
        all_gather_single(rows, mine, group=dist.group.WORLD, async_op=False)
        return rows.tolist() == [1, 1, 2, 2]

    def single_scatter() -> bool:
        part, rows = torch.zeros(2, device=device), mine.repeat(2)
        reduce_scatter_single(part, rows, op=dist.ReduceOp.SUM, group=dist.group.WORLD, async_op=False)
        return part.tolist() == [3, 3]

    def list_gather() -> bool:
        parts = [torch.zeros(2, device=device) for _ in range(2)]
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts] == [[1, 1], [2, 2]]

    def all_reduce() -> bool:
        total = mine.clone()
        dist.all_reduce(total)
        return total.tolist() == [3, 3]

    refused = {}
    for call in (single_gather, single_scatter, list_gather, all_reduce):
        try:
            if not call():
                refused[call.__name__] = "wrong values"
        except Exception as error:
            refused[call.__name__] = str(error).splitlines()[0]
    return refused
