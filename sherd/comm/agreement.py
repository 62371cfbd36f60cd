"""The agreement of ranks on a change of their models: all ranks change alike, and take the values of rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.errors import RanksDifferError, in_short


def groups_of(mesh: DataMesh) -> list[dist.ProcessGroup]:
    return [group for group in (mesh.replicate_group, mesh.shard_group) if group is not None and group.size() > 1]


def require_alike(mesh: DataMesh, mine: Sequence[str], what: str) -> None:
    """Raise the same error on all ranks of `mesh` if they differ in `mine`, which is `what` in words.

    All ranks must call this.

    Raises:
        RanksDifferError: some ranks have items in `mine` that others do not have, or another order.
        CommError: a rank has died, or did not come before the group's timeout.
    """
    by_rank = {dist.get_rank(): list(mine)}
    for group in groups_of(mesh):  # along the second axis, each rank passes on what it has of the first
        parts = all_gather_objects(by_rank, f"the comparison of {what}", group)
        by_rank = {rank: items for part in parts for rank, items in part.items()}
    by_rank = dict(sorted(by_rank.items()))
    if len({tuple(items) for items in by_rank.values()}) == 1:
        return
    every = dict.fromkeys(item for items in by_rank.values() for item in items)
    having = {item: [rank for rank, items in by_rank.items() if item in items] for item in every}
    some = [f"{item} only on ranks {ranks}" for item, ranks in having.items() if len(ranks) < len(by_rank)]
    raise RanksDifferError(
        f"the ranks differ in {what}: {in_short(some) or 'the same ones, in another order'}. Nothing was done about "
        "them; change the model on all ranks alike, in the same order"
    )


def broadcast_from_rank0(tensors: Sequence[torch.Tensor], mesh: DataMesh, what: str) -> None:
    """Send the values of rank 0 to all ranks of `mesh`: along the replicate axis, then along the shard axis.

    For a DTensor pass this rank's part, because ranks along the other axes of its mesh have other parts.
    """
    for group in groups_of(mesh):
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            with named(what, group):
                dist.broadcast(sent, group_src=0, group=group)
            if sent.data_ptr() != tensor.data_ptr():  # a tensor that is not contiguous was sent as a copy
                tensor.copy_(sent)
