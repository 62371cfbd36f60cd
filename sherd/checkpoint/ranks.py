"""The ranks that save or load together: an error of one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from sherd.comm.failures import announced
from sherd.comm.groups import host_group_beside
from sherd.comm.objects import all_gather_objects, device_of
from sherd.errors import CheckpointError, NoCheckpointError, StorageError
from sherd.storage.places import says_absent

T = TypeVar("T")


class OtherRankFailed(CheckpointError):
    """Another rank has raised an error of its program, which says nothing about the files."""


class Ranks:
    """The ranks of a process group, over a group of their own on the host; or this process alone.

    All ranks make the same calls, in the same words of `call`. Without a `group` these are all ranks, or this process.
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
                with announced((group,), "begins a checkpoint", call, is_rare=True):
                    self._group = host_group_beside(group, "checkpoints", self.numbers, device_of(group))

    def gather(self, mine: T, task: str) -> list[T]:
        """Returns `mine` of all ranks. Raises CommError."""
        return [mine] if self._group is None else all_gather_objects(mine, task, self._group)

    def each(self, action: Callable[[], T], task: str) -> list[T]:
        """Returns the results of `action` on all ranks; `task` names it in errors.

        Raises:
            CheckpointError: an error of one rank, on all ranks. If it is no CheckpointError and no OSError, this rank
                raises it as it is, and the others raise `OtherRankFailed`.
            CommError: a rank has died.
        """
        result, own, failure = None, None, None
        try:
            result = action()
        except Exception as error:
            own, failure = error, _failure_of(error)
        answers = self.gather((self.call, result, failure), task)
        calls = {rank: call for rank, (call, *_) in zip(self.numbers, answers, strict=True)}
        if len({*calls.values()}) > 1:
            raise CheckpointError(
                f"ranks call different things: {'; '.join(f'rank {rank} {call}' for rank, call in calls.items())}. All "
                "of them must make the same call, with the same items"
            ) from own
        failures = {rank: of for rank, (*_, of) in zip(self.numbers, answers, strict=True) if of is not None}
        if own is not None and failure is not None and failure[0] is OtherRankFailed:
            raise own
        if failures:
            # A StorageError first: after it no rank may take the files for damaged.
            rank, (error_class, text) = min(failures.items(), key=lambda item: item[1][0] is not StorageError)
            where = f" on rank {rank}" if self.size > 1 else ""
            more = len(failures) - 1
            others = f" (and on {more} other rank{'s' * (more > 1)})" if more else ""
            text = text if error_class is NoCheckpointError else f"{task} failed{where}: {text}{others}"
            raise error_class(text) from own
        return [cast(T, result) for _, result, _ in answers]

    def first(self, action: Callable[[], T], task: str) -> T:
        """Returns, on all ranks, the result of `action` on the first. Raises as `each`."""
        return self.each(action if self.rank == 0 else lambda: None, task)[0]  # type: ignore[return-value]


def _failure_of(error: Exception) -> tuple[type[CheckpointError], str]:
    for error_class in (NoCheckpointError, StorageError, CheckpointError):
        if isinstance(error, error_class):
            return error_class, Exception.__str__(error)
    if not isinstance(error, OSError):
        return OtherRankFailed, f"{type(error).__name__}: {error}"
    text = f"{type(error).__name__}: {error}"
    if error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return CheckpointError if says_absent(error) else StorageError, text
