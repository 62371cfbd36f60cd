"""The collectives that a model itself calls, read from torch's operations: those of `torch.distributed`, and those of
DTensor and other functional code."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from sherd._torch import group_among
from sherd.tools.simulate.work import ALONE, Collective, Group

__all__ = ["collective_of", "group_of", "is_communication"]

# By the operation's name: the kind, and which argument is the whole tensor, None for the result.
_C10D: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("broadcast", 0),
    "send": ("send", 0),
}
_FUNCTIONAL: dict[str, tuple[str, int | None]] = {
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_coalesced": ("all-gather", None),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "all_to_all_single": ("all-to-all", 0),
    "broadcast": ("broadcast", 0),
}


def is_communication(func: Any) -> bool:
    """Returns whether an operation of torch is a collective, or waits for one."""
    return func.namespace in ("c10d", "_c10d_functional")


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """Returns the collective that `func`, which is communication, has started; None if it has started none, as one that
    waits, receives, or has a group of one rank."""
    known = _C10D if func.namespace == "c10d" else _FUNCTIONAL
    kind, whole = known.get(func.overloadpacket.__name__, ("", None))
    group = group_of(group_among(args)) if kind else ALONE
    if group.size == 1:
        return None
    return Collective(kind, _num_bytes(result if whole is None else args[whole]), group)


def group_of(group: dist.ProcessGroup | None) -> Group:
    """Returns the ranks of a process group; None is a rank alone."""
    if group is None or group.size() == 1:
        return ALONE
    ranks = dist.get_process_group_ranks(group)
    return Group(len(ranks), max(1, (max(ranks) - min(ranks)) // (len(ranks) - 1)))


def _num_bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(_num_bytes(each) for each in values)
