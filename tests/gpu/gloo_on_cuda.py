"""What gloo does with CUDA tensors, found out by asking: ranks that share one GPU have no other backend."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from sherd._torch import all_gather_single, reduce_scatter_single
from tests.gpu.devices import here


def _single_gather(mine: torch.Tensor) -> bool:
    rows = mine.new_zeros(4)
    all_gather_single(rows, mine, group=dist.group.WORLD, async_op=False)
    return rows.tolist() == [1, 1, 2, 2]


def _functional_gather(mine: torch.Tensor) -> bool:
    """What torch's own DTensor calls."""
    return all_gather_tensor(mine, 0, dist.group.WORLD).tolist() == [1, 1, 2, 2]


def _single_scatter(mine: torch.Tensor) -> bool:
    part = mine.new_zeros(2)
    reduce_scatter_single(part, mine.repeat(2), op=dist.ReduceOp.SUM, group=dist.group.WORLD, async_op=False)
    return part.tolist() == [3, 3]


def _list_gather(mine: torch.Tensor) -> bool:
    parts = [mine.new_zeros(2) for _ in range(2)]
    dist.all_gather(parts, mine)
    return [part.tolist() for part in parts] == [[1, 1], [2, 2]]


def _all_reduce(mine: torch.Tensor) -> bool:
    dist.all_reduce(mine)
    return mine.tolist() == [3, 3]


CALLS = {
    "single_gather": _single_gather,
    "functional_gather": _functional_gather,
    "single_scatter": _single_scatter,
    "list_gather": _list_gather,
    "all_reduce": _all_reduce,
}


def refused_by_gloo(call: str) -> str:
    """On one of two ranks: returns what gloo said where it refuses a collective on CUDA tensors or gets it wrong."""
    mine = torch.full((2,), float(dist.get_rank() + 1), device=here().device)
    try:
        return "" if CALLS[call](mine) else "wrong values"
    except Exception as error:
        return str(error).splitlines()[0]
