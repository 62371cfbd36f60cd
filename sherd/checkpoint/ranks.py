"""The ranks that save or load together: what one of them meets, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from sherd.comm.groups import host_group_beside
from sherd.comm.objects import all_gather_objects, device_of
from sherd.errors import CheckpointError, NoCheckpointError, StorageError
from sherd.storage.places import says_absent

T = TypeVar("T")


class OtherRankFailed(CheckpointError):
    """Another rank has raised something that has to do with its program, not with files."""


class Ranks:
    """The ranks of a process group, over a group of their own on the host; or this process alone.

    All of them make the same calls.

    Args:
        group: the ranks; None: all, or this process alone where there is no process group.
        call: what this rank does with the others, in words that all ranks have alike.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, call: str = "") -> None:
        self.call = call
        group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self._group: dist.ProcessGroup | None = None
        self.numbers, self.rank, self.size = [0], 0, 1
        if group is not None:
            self.numbers = dist.get_process_group_ranks(group)
            self.rank, self.size = dist.get_rank(group), len(self.numbers)
            if self.size > 1:
                self._group = host_group_beside(group, "checkpoints", self.numbers, device_of(group))

    def gather(self, mine: T, what: str) -> list[T]:
        """Returns `mine` of all ranks. Raises CommError."""
        return [mine] if self._group is None else all_gather_objects(mine, what, self._group)

    def each(self, action: Callable[[], T], what: str) -> list[T]:
        """Returns the results of `action` on all ranks.

        Raises:
            CheckpointError: what one rank has raised, on all ranks. If that is no CheckpointError and no OSError, this
                rank raises it as it is, and the others raise `OtherRankFailed`.
            CommError: a rank has died.
        """
        result, own = None, None
        try:
            result = action()
        except Exception as raised:
            own = raised
        failure = None if own is None else (_kind_of(own), _text_of(own))
        told = self.gather((self.call, result, failure), what)
        calls = {rank: call for rank, (call, *_) in zip(self.numbers, told, strict=True)}
        if len({*calls.values()}) > 1:
            raise CheckpointError(
                f"ranks call different things: {'; '.join(f'rank {rank} {call}' for rank, call in calls.items())}. All "
                "of them must make the same call, with the same items"
            ) from own
        failed = {rank: each for rank, (*_, each) in zip(self.numbers, told, strict=True) if each is not None}
        if own is not None and failure is not None and failure[0] is OtherRankFailed:
            raise own
        if failed:
            rank, (kind, text) = min(failed.items(), key=lambda each: each[1][0] is not StorageError)
            where = f"on rank {rank}: " if self.size > 1 else ""
            others = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
            raise kind(text if kind is NoCheckpointError else f"{what} failed {where}{text}{others}") from own
        return [cast(T, result) for _, result, _ in told]

    def first(self, action: Callable[[], T], what: str) -> T:
        """Returns, on all ranks, the result of `action` on the first. Raises as `each`."""
        return self.each(action if self.rank == 0 else lambda: None, what)[0]  # type: ignore[return-value]


def _kind_of(error: Exception) -> type[CheckpointError]:
    for kind in (NoCheckpointError, StorageError, CheckpointError):
        if isinstance(error, kind):
            return kind
    if isinstance(error, OSError):
        return CheckpointError if says_absent(error) else StorageError
    return OtherRankFailed


def _text_of(error: Exception) -> str:
    if not isinstance(error, CheckpointError) and isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return Exception.__str__(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
