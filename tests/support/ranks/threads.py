"""A function on ranks that are threads of this process."""

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed import multi_threaded_pg

from tests.support.ranks.caches import forget_redistributions
from tests.support.ranks.failures import Failure, RanksFailed, failure_of, name_of, places
from tests.support.ranks.generators import generators_by_thread, own_generator

# A rank whose collective was broken off gets this long to say so.
GRACE_S = 1.0


@contextlib.contextmanager
def _threaded_groups() -> Iterator[None]:
    """Inside, process groups are each thread's own, and they meet in this process."""
    multi_threaded_pg._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()


def _break_off_collectives() -> None:
    """Have every rank leave the collective it waits in. torch's own `exception_handle` does so while it walks a
    dictionary that other ranks change."""
    group = multi_threaded_pg.ProcessLocalGroup
    group._terminate.set()
    with group._coll_lock:
        collectives = list(group._cur_coll_on_pgs.values())
    for condition in (each for one in collectives for each in (one._start_cond, one._done_cond)):
        with condition:
            condition.notify_all()


@dataclass(eq=False)
class _Task:
    """One function for every rank, and what has become of it."""

    call: Callable[[], Any]
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    groups_changed: bool = False


class _Rank:
    """A thread that is one rank, from the first task until it is told to end."""

    def __init__(self, rank: int, num_ranks: int, store: dist.Store) -> None:
        self._rank, self._num_ranks, self._store = rank, num_ranks, store
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._finished = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def begin(self, task: _Task) -> None:
        self._tasks.put(task)

    def finished_within(self, seconds: float) -> bool:
        """Whether the task begun last has ended."""
        return self._finished.acquire(timeout=max(0.0, seconds))

    def stop(self) -> None:
        """End after the task at hand."""
        self._tasks.put(None)

    def stack(self) -> str:
        """Where the thread is just now."""
        assert self._thread.ident is not None, "started"
        frames = reversed(list(traceback.walk_stack(sys._current_frames()[self._thread.ident])))
        return places(frames, others_too=True)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)
            del task  # it holds what the test's function was given and returned
            self._finished.release()

    def _do(self, task: _Task) -> None:
        try:
            if not dist.is_initialized():
                dist.init_process_group("threaded", rank=self._rank, world_size=self._num_ranks, store=self._store)
            with torch.autograd.set_multithreading_enabled(False), own_generator():
                task.results[self._rank] = task.call()
        except SystemExit as error:
            # So the threaded group leaves a collective once another rank failed; else the function's own.
            if not task.failures:
                task.failures[self._rank] = failure_of(error)
        except BaseException as error:
            task.failures[self._rank] = failure_of(error)
            _break_off_collectives()
        if len(dist.distributed_c10d._world.pg_map) != 1:
            task.groups_changed = True


class Threads:
    """`num_ranks` ranks as threads of this process.

    They live on, since DTensor remembers per thread what it has worked out about an operation, and working it out takes
    longer than most tests. Once a function has failed, or has made groups of its own, the next one gets fresh threads.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ranks: list[_Rank] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; the results, index = rank. Raises RanksFailed."""
        __tracebackhide__ = True
        task = _Task(lambda: fn(*args, **kwargs))
        done = False
        with _threaded_groups(), generators_by_thread():
            try:
                if not self._ranks:
                    self._start()
                for rank in self._ranks:
                    rank.begin(task)
                self._wait(task, timeout)
                done = not task.failures and not task.groups_changed
            finally:
                if not done:
                    self.stop()
        if task.failures:
            raise RanksFailed(name_of(fn), task.failures, {})
        return [task.results[rank] for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """Let the threads end. The next `run` starts fresh ones."""
        for rank in self._ranks:
            rank.stop()
        self._ranks = []

    def _start(self) -> None:
        # DTensor enters such a mode to learn shapes. In a CUDA build on a machine without a device the first to enter
        # one replaces the device guard; two threads at once kill the process (2.11).
        with FakeTensorMode():
            pass
        forget_redistributions()
        store = dist.HashStore()
        self._ranks = [_Rank(rank, self.num_ranks, store) for rank in range(self.num_ranks)]

    def _wait(self, task: _Task, timeout: float) -> None:
        """Until every rank is done; late ones get a stack in `failures` and a push out of their collective."""
        deadline = time.monotonic() + timeout
        late = [n for n, rank in enumerate(self._ranks) if not rank.finished_within(deadline - time.monotonic())]
        said = f"not finished after {timeout:g} s"
        for number in late:
            task.failures.setdefault(number, Failure("TimeoutError", said, f"{said}\n{self._ranks[number].stack()}"))
        if late:
            _break_off_collectives()
            for number in late:
                self._ranks[number].finished_within(GRACE_S)
