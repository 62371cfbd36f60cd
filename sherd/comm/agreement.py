"""The agreement of ranks: on what they have, on whether all could do something, and on the values of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects, device_of
from sherd.errors import RanksDifferError, ScratchError, SherdError, in_short

T = TypeVar("T")

Failure = tuple[type[SherdError], str]
"""The class and the text of an error that all ranks raise."""


def on_all_ranks(action: Callable[[], T], what: str, failure_of: Callable[[Exception], Failure | None]) -> T:
    """Returns the result of `action` on this rank. All ranks must call this, and all raise the failure of one.

    An error of which `failure_of` returns None is raised on this rank alone, which asks no other rank then.
    """
    value, own, failure = None, None, None
    try:
        value = action()
    except Exception as error:
        own, failure = error, failure_of(error)
        if failure is None:
            raise
    for of_rank in all_gather_objects(failure, what):
        if of_rank is not None:
            error_class, text = of_rank
            raise error_class(text) from own
    return value  # type: ignore[return-value]


def gathered_along(groups: Iterable[dist.ProcessGroup], mine: object, what: str) -> list[Any]:
    """Returns `mine` of all ranks of a mesh with these axes: each axis passes on what the axes before it gathered."""
    everything = [mine]
    for group in groups:
        everything = [each for of_rank in all_gather_objects(everything, what, group) for each in of_rank]
    return everything


@contextmanager
def failing_together(groups: Collection[dist.ProcessGroup], what: str) -> Iterator[None]:
    """A context in which a ScratchError of one rank is raised on all ranks of a mesh with these axes.

    All of them must enter it. Without an error it costs one flag for each axis.
    """
    failure = None
    try:
        yield
    except ScratchError as error:
        if not groups:
            raise
        failure = error
    failed = torch.tensor([failure is not None], dtype=torch.int32)
    for group in groups:
        on_wire = failed.to(device_of(group))
        with named(what, group):
            dist.all_reduce(on_wire, dist.ReduceOp.MAX, group)
        failed = on_wire.cpu()
    if failed.item():
        said = failure and f"on rank {dist.get_rank()}: {failure.args[0]}"
        for told in gathered_along(groups, said, what):
            if told is not None:
                raise ScratchError(told) from failure


def groups_of(mesh: DataMesh) -> list[dist.ProcessGroup]:
    return [group for group in (mesh.replicate_group, mesh.shard_group) if group is not None and group.size() > 1]


def require_alike(mesh: DataMesh, mine: Sequence[str], what: str) -> None:
    """Raise the same error on all ranks of `mesh` if they differ in `mine`, which is `what` in words.

    All ranks must call this.

    Raises:
        RanksDifferError: some ranks have items in `mine` that others do not have, or another order.
        CommError: a rank has died, or did not come before the group's timeout.
    """
    own = dist.get_rank(), list(mine)
    by_rank: dict[int, list[str]] = dict(sorted(gathered_along(groups_of(mesh), own, f"the comparison of {what}")))
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
