"""`CommError`s for unfinished collectives, which name the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from sherd.errors import CommError


def unfinished(what: str, ranks: Sequence[int], error: Exception, peer: int | None = None) -> CommError:
    """Returns the error of `what`, a collective of `ranks` that `error` has ended.

    `peer` is the index in `ranks` of the rank to blame, if one rank alone is.
    """
    others = [rank for rank in ranks if rank != dist.get_rank()] if peer is None else [ranks[peer]]
    with_whom = f" with rank {others[0]}" if len(others) == 1 else ""
    who = f"Rank {others[0]}" if len(others) == 1 else f"One of the ranks {ranks_in_short(others)}"
    return CommError(
        f"{what} among ranks {ranks_in_short(ranks)} failed on rank {dist.get_rank()}{with_whom}: "
        f"{said_by_torch(error)}. {who} has died, has left, is late, or does not make this call (a branch on the "
        "rank?): look for the first error in the logs of all ranks and start them again from the last checkpoint; this "
        "group is of no more use. If a rank was only late, give init_process_group a longer timeout"
    )


def said_by_torch(error: Exception) -> str:
    """Returns what a backend's `error` says, without the source line before, and advice and frames after it."""
    said = re.sub(r"^\[[^]]*\.\w+:\d+\] ", "", str(error))
    return re.split(r" This is typically caused by|\nException raised from ", said)[0].rstrip(". ")


@contextmanager
def named(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A context for one collective of torch over `group`, or the default group: a RuntimeError becomes a CommError."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        group = group or dist.group.WORLD
        assert group is not None, "a collective has begun, so there is a group"
        raise unfinished(what, dist.get_process_group_ranks(group), error) from error


def own_rank() -> int:
    """Returns the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_in_short(ranks: Sequence[int]) -> str:
    """Returns `ranks` in brackets; of more than 16 only the first, the last and the number."""
    return f"{list(ranks)}" if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}] ({len(ranks)} of them)"
