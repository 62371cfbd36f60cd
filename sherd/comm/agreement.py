"""The agreement of ranks on a change of their models: the same is said on all of them, and values are rank 0's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.errors import RanksDifferError

MOST_SHOWN = 8
"""Parameters that a message names."""


def in_short(names: Sequence[str], most: int = MOST_SHOWN) -> str:
    """Returns the first `most` of `names` for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def groups_of(mesh: DataMesh) -> list[dist.ProcessGroup]:
    """Returns the groups along the axes of `mesh` that have more than one rank."""
    return [group for group in (mesh.replicate_group, mesh.shard_group) if group is not None and group.size() > 1]


def require_alike(mesh: DataMesh, mine: Sequence[str], what: str) -> None:
    """Raise the same error on all ranks of `mesh` if they differ in `mine`, which is `what` in words. All of them must
    call it.

    Raises:
        RanksDifferError: it names what some ranks have and others do not.
        CommError: a rank has died, or did not come before the group's timeout.
    """
    by_rank = {dist.get_rank(): list(mine)}
    for group in groups_of(mesh):
        parts = all_gather_objects(by_rank, f"the comparison of {what}", group)
        by_rank = {rank: said for part in parts for rank, said in part.items()}
    by_rank = dict(sorted(by_rank.items()))
    if len({tuple(said) for said in by_rank.values()}) == 1:
        return
    every = dict.fromkeys(each for said in by_rank.values() for each in said)
    having = {each: [rank for rank, said in by_rank.items() if each in said] for each in every}
    some = [f"{each} only on ranks {ranks}" for each, ranks in having.items() if len(ranks) < len(by_rank)]
    raise RanksDifferError(
        f"the ranks differ in {what}: {in_short(some) or 'the same ones, in another order'}. Nothing was done about "
        "them; change the model on all ranks alike, in the same order"
    )


def broadcast_from_rank0(tensors: Sequence[torch.Tensor], mesh: DataMesh, what: str) -> None:
    """Send the values of rank 0 to all ranks of `mesh`: along the replicate axis, then along the shard axis.

    Of a DTensor give this rank's part, as ranks along the other axes of its mesh have other parts.
    """
    for group in groups_of(mesh):
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            with named(what, group):
                dist.broadcast(sent, group_src=0, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
