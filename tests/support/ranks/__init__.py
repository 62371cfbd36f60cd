"""A test runs a function on several ranks, and sees when one of them fails.

    from torch import distributed as dist

    def sum_of_ranks(scale):                      # at module level: ranks import it by name
        total = torch.tensor(dist.get_rank() * scale)
        dist.all_reduce(total)
        return total.item()

    def test_every_rank_sees_the_sum(world):
        assert world(2).run(sum_of_ranks, 10) == [10, 10]          # index = rank

`world(n)`, n in 1..4: n gloo processes on CPU, one intra-op thread each, the default group ready. They live
as long as the pytest session, so a test costs about a millisecond. Function, arguments and results are
pickled; `tests` is a package and the repository's root is on the ranks' path, as under pytest. Result tensors
arrive as plain, detached CPU tensors (of a DTensor return `.to_local()` or `.full_tensor()`). Each run starts
from `torch.manual_seed(0)` and under the test's own warning filters.

`threads(n)`, n in 1..8: n threads of this process on torch's threaded group, which live as long. Easy to debug and good
for wide meshes, but threads share the random generator, the arguments and every global: seed and build before `run`.
`@on_threads(n)` and `@on_processes(n)` of `ranks.bodies`, above a test, have its whole body run so.

A failure is one `RanksFailed`, with each rank's words and places, the last lines that it printed, and
`errors[rank] == (type name, message)`. What ranks print is shown by `pytest -s` alone otherwise. A rank still busy
after `run(..., timeout=300)` seconds shows its stack. After any failure the processes are killed;
the next run gets fresh ones, forked in a fraction of a second from a server that has torch imported.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import distributed as dist

from tests.support.ranks.failures import Failure, RanksFailed, last_lines, name_of, of_stack
from tests.support.ranks.process import Setup, Success, serve
from tests.support.ranks.threads import Threads

__all__ = ["Pools", "Processes", "RanksFailed", "Setup", "Threads", "warm_up"]

MAX_PROCESSES = 4
MAX_THREADS = 8
TIMEOUT_S = 300.0
# After a first failure the other ranks get this long to tell theirs; a rank stuck in a collective never will.
GRACE_S = 5.0
# Ranks with more groups than that between tests get successors. A group that somebody still knows, though it is
# destroyed, keeps its threads, and one of them wakes a hundred times a second: a hundred groups, on four ranks, take a
# third of a core.
MOST_LOOPS = 12
# What tests need sooner or later, imported once by the fork server and not once per rank, which takes half a second of
# each start. `torch._dynamo` is in it because every optimizer imports it on first use.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "pytest",
    "hypothesis",
    "sherd.train.rank",
    "sherd.cli.main",
    "tests.support.ranks.process",
    "tests.support.models",
    "tests.support.training",
]
# These too where the tests that were collected need them, as those of tests/interop do.
PACKAGES = ["transformers", "accelerate", "peft", "trl", "lightning.pytorch"]


GLOO = Setup()


class Processes:
    """`num_ranks` live processes, on gloo if `setup` says no other; `run` sends them one function and gathers what it
    returned."""

    def __init__(self, num_ranks: int, setup: Setup = GLOO, quiet: bool = True) -> None:
        self.num_ranks = num_ranks
        self._setup, self._quiet = setup, quiet
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; the results, index = rank. Raises RanksFailed."""
        __tracebackhide__ = True
        task = packed_task(fn, args, kwargs)
        results: dict[int, Success] = {}
        failures: dict[int, Failure] = {}
        try:
            if not self._workers:
                self._start()
            self._send(task)
            self._gather(results, failures, timeout)
            stuck = self._stacks(set(range(self.num_ranks)) - results.keys() - failures.keys())
        except BaseException:
            self.stop()
            raise
        if stuck and not failures:
            said = f"not finished after {timeout:g} s"
            failures = {rank: Failure("TimeoutError", said, f"{said}\n{stack}") for rank, stack in stuck.items()}
            stuck = {}
        if failures:
            self.stop()
            raise RanksFailed(name_of(fn), failures, stuck)
        if max(each.loops for each in results.values()) > MOST_LOOPS:
            self.stop()
        return [results[rank].value for rank in range(self.num_ranks)]

    def end(self) -> None:
        """Let the processes end by themselves, so that coverage can write what it has seen."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        """Kill the processes. The next `run` starts fresh ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._pipes, self._folder, self._store = [], [], None, None

    def _start(self) -> None:
        warm_up()
        context = multiprocessing.get_context("forkserver")
        # The store lives here, as torchrun's does, so it outlasts a rank that dies.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            stacks = self._stack_file(rank)
            said = f"{stacks}.said" if self._quiet else None
            args = (rank, self.num_ranks, self._store.port, theirs, stacks, self._setup, said)
            worker = context.Process(target=serve, args=args, name=f"rank {rank} of {self.num_ranks}")
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)

    def _send(self, task: bytes) -> None:
        for pipe in self._pipes:
            # A rank that died since the last test cannot be written to; `_gather` sees that and names it.
            with contextlib.suppress(OSError):
                pipe.send_bytes(task)

    def _gather(self, results: dict[int, Success], failures: dict[int, Failure], timeout: float) -> None:
        """Read replies until every rank has answered, one has died, or time is up."""
        deadline = time.monotonic() + timeout
        waiting = set(range(self.num_ranks))
        while waiting:
            watched = [self._pipes[rank] for rank in waiting] + [self._workers[rank].sentinel for rank in waiting]
            ready = connection.wait(watched, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in sorted(waiting):
                if self._pipes[rank] not in ready and self._workers[rank].sentinel not in ready:
                    continue
                waiting.discard(rank)
                reply = self._reply(rank)
                if isinstance(reply, Failure):
                    failures[rank] = reply
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    results[rank] = reply

    def _reply(self, rank: int) -> "Failure | Success":
        try:
            # A dead rank's pipe may still hold its answer; the end of the file comes after it.
            reply = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._workers[rank].join()
            said = f"rank {rank} died: {_exit(self._workers[rank].exitcode)}"
            stack, printed = (Path(f"{self._stack_file(rank)}{end}") for end in ("", ".said"))
            left = of_stack(stack.read_text()) if stack.exists() else ""
            left += last_lines(printed.read_text(errors="replace")) if printed.exists() else ""
            return Failure("Died", said, f"{said}\n{left}")
        assert isinstance(reply, Failure | Success), "ranks send nothing else"
        return reply

    def _stack_file(self, rank: int) -> str:
        assert self._folder is not None, "made by _start, before any rank"
        return os.path.join(self._folder.name, str(rank))

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        """Where each of these ranks is just now, by Python's fault handler."""
        stacks = {}
        for rank in sorted(ranks):
            pid = self._workers[rank].pid
            assert pid is not None, "started"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        for rank in sorted(ranks):
            file, patience = Path(self._stack_file(rank)), time.monotonic() + 2
            before, size = -1, 0
            # A dump has no last word: it is whole once it has stopped growing.
            while (size == 0 or size != before) and time.monotonic() < patience:
                time.sleep(0.02)
                before, size = size, file.stat().st_size if file.exists() else 0
            stacks[rank] = of_stack(file.read_text()) if file.exists() else "(it had not joined the group yet)"
        return stacks


def packed_task(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """For `tests.support.ranks.process.answer`."""
    try:
        call = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name_of(fn)} cannot be sent to the ranks ({error}); give run() a function at module level "
            "and arguments that pickle"
        ) from error
    return pickle.dumps((sys.path, os.environ.get("PYTEST_CURRENT_TEST", ""), _warning_filters(), call))


def _warning_filters() -> list[tuple[Any, ...]]:
    """The filters in force, the first to match first, as arguments of `warnings.filterwarnings`."""

    def pattern(text: Any) -> str:
        return getattr(text, "pattern", text) or ""

    return [
        (action, pattern(text), kind, pattern(module), line) for action, text, kind, module, line in warnings.filters
    ]


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"left with exit code {code}"


class Pools:
    """One set of processes for each setup and number of ranks, one of threads for each number of ranks; each started
    when first asked for."""

    def __init__(self, quiet: bool = True) -> None:
        self._quiet = quiet
        self._sets: dict[tuple[int, Setup], Processes] = {}
        self._threads: dict[int, Threads] = {}
        atexit.register(self.stop)

    def world(self, num_ranks: int, setup: Setup = GLOO) -> Processes:
        """`num_ranks` processes, 1 to 4."""
        if not 1 <= num_ranks <= MAX_PROCESSES:
            raise ValueError(f"world({num_ranks}): a test may ask for 1 to {MAX_PROCESSES} processes")
        return self._sets.setdefault((num_ranks, setup), Processes(num_ranks, setup, self._quiet))

    def threads(self, num_ranks: int) -> Threads:
        """`num_ranks` threads, 1 to 8."""
        if not 1 <= num_ranks <= MAX_THREADS:
            raise ValueError(f"threads({num_ranks}): a test may ask for 1 to {MAX_THREADS} threads")
        return self._threads.setdefault(num_ranks, Threads(num_ranks))

    def stop(self) -> None:
        for processes in self._sets.values():
            processes.end()
        for threads in self._threads.values():
            threads.stop()
        # It has waited for the ranks, and we for it: then whoever counts our CPU time counts theirs. Its names are not
        # documented (3.10 to 3.13), and when Python ends there are no threads.
        with contextlib.suppress(AttributeError, RuntimeError):
            end = threading.Thread(target=forkserver._forkserver._stop, daemon=True)
            end.start()
            end.join(GRACE_S)


def warm_up() -> None:
    """Let the fork server import torch from now on, beside the tests that need no ranks."""
    needed = [name for name in PACKAGES if name in sys.modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *needed])
    forkserver.ensure_running()
