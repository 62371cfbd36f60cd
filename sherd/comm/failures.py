"""`CommError`s for unfinished collectives, which name the ranks; collectives outside of units are announced before."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from sherd.errors import CommError


def unfinished(what: str, ranks: Sequence[int], error: Exception, peer: int | None = None) -> CommError:
    """Returns the error of `what`, a collective of `ranks` that `error` has ended.

    `peer` is the index in `ranks` of the rank to blame, if one rank alone is.
    """
    # torch's text goes on with frames of C++, which say nothing to a user, and would stand above what we say.
    said = said_by_torch(error)
    error.args = (said,)
    others = [rank for rank in ranks if rank != dist.get_rank()] if peer is None else [ranks[peer]]
    with_whom = f" with rank {others[0]}" if len(others) == 1 else ""
    who = f"Rank {others[0]}" if len(others) == 1 else f"One of the ranks {ranks_in_short(others)}"
    return CommError(
        f"{what} among ranks {ranks_in_short(ranks)} failed on rank {dist.get_rank()}{with_whom}: {said}. {who} has "
        "died, has left, is late, or does not make this call (a branch on the rank?): look for the first error in the "
        "logs of all ranks and start them again from the last checkpoint; this group is of no more use. If a rank was "
        "only late, give init_process_group a longer timeout"
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


ENDED = "has ended, and no error has ended it: did it have fewer batches? Ranks that run out of batches need sherd.join"

_raised: list[BaseException] = []


def ends_well() -> bool:
    """Returns whether this process, which is ending, ends without an exception; `sys.exit(1)` cannot be seen.

    Within the finalizers of a process that multiprocessing has started, the exception is being handled.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        _raised.append(error)
    return not _raised


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_in_short(ranks: Sequence[int]) -> str:
    """Returns `ranks` in brackets; of more than 16 only the first, the last and the number."""
    return f"{list(ranks)}" if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}] ({len(ranks)} of them)"


Groups = Iterable[dist.ProcessGroup | Sequence[int] | None]
Listener = Callable[[Groups, str, str, bool], AbstractContextManager[None]]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Have `listener` told of each collective outside of units, with the arguments of `announced`."""
    _listeners[:] = [listener]


def announced(groups: Groups, what: str, purpose: str = "", is_rare: bool = False) -> AbstractContextManager[None]:
    """Returns a context for a collective over `groups`, axes of one mesh (None: all ranks), or one after the other.

    Args:
        groups: process groups, or their ranks.
        what: the collective in words, equal on all ranks, such as "exchanges objects".
        purpose: what it is for, in words that may differ between ranks.
        is_rare: all ranks are asked each time, and not only where it comes unexpectedly.

    Raises:
        CommError: other ranks do not make this call.
    """
    # Other threads (a save that goes on during training) have an order of their own.
    if not _listeners or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _listeners[0](groups, what, purpose, is_rare)
