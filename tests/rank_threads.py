"""How does a function run on ranks that are threads of this process?"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg

from tests.rank_failures import Failure, RanksFailed, failure_of, name_of


class Threads:
    """`num_ranks` ranks as threads of this process, started for each `run`."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; the results, index = rank. Raises RanksFailed."""
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        store = dist.HashStore()

        def one_rank(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=self.num_ranks, store=store)
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(*args, **kwargs)
            except SystemExit as error:
                # So the threaded group leaves a collective once another rank failed; else the function's own.
                if not failures:
                    failures[rank] = failure_of(error)
            except BaseException as error:
                failures[rank] = failure_of(error)
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

        ranks = [threading.Thread(target=one_rank, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        multi_threaded_pg._install_threaded_pg()
        _set_thread_isolation_mode(True)
        try:
            for thread in ranks:
                thread.start()
            self._wait(ranks, failures, timeout)
        finally:
            _set_thread_isolation_mode(False)
            multi_threaded_pg._uninstall_threaded_pg()
            multi_threaded_pg.ProcessLocalGroup.reset()
        if failures:
            raise RanksFailed(name_of(fn), failures, {})
        return [results[rank] for rank in range(self.num_ranks)]

    def _wait(self, ranks: list[threading.Thread], failures: dict[int, Failure], timeout: float) -> None:
        """Join the threads; late ones get a stack in `failures` and a push out of their collective."""
        deadline = time.monotonic() + timeout
        for thread in ranks:
            thread.join(max(0.0, deadline - time.monotonic()))
        frames = sys._current_frames()
        late = {rank: frames[thread.ident] for rank, thread in enumerate(ranks) if thread.ident in frames}
        said = f"not finished after {timeout:g} s"
        for rank, frame in late.items():
            stack = "".join(traceback.format_stack(frame))
            failures.setdefault(rank, Failure("TimeoutError", said, f"{said}\n{stack}"))
        if late:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(TimeoutError(said))
            for thread in ranks:
                thread.join(1.0)
