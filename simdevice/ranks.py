"""Functions run on several ranks of one machine, processes with a simulated device each, which tell what it has seen.

    from simdevice.ranks import Processes, World

    def sum_of_ranks():                                    # at module level: ranks import it by name
        total = torch.ones(1, device="sim")                # the current device is sim:<rank>
        dist.all_reduce(total)                             # the default group is "cpu:gloo,sim:simccl"
        return total

    if __name__ == "__main__":
        with Processes(2) as processes:                    # they live until the end of the block
            found = World(processes, pause_us=300, seed=1).run(sum_of_ranks)
        assert found.values == [2, 2]                      # index = rank; tensors come as CPU tensors
        assert not any(found.host_waits)

`run` fails if the device has found a race on any rank. `observe` does not: it returns the races with the rest. The
keywords of `World` are those of `simdevice.configure`, which holds for one run; races and host waits are counted from
its start.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

import simdevice

BACKEND = "cpu:gloo,sim:simccl"
TIMEOUT = timedelta(seconds=90)
"""Of every group. Shorter than a run may take, so that the rank that does not come is named."""
RUN_S = 180.0
"""How long a run may take: an end for what hangs. A busy machine may be many times slower than an idle one."""
START_S = 300.0
"""How long ranks may take to start."""
GRACE_S = 5.0
"""After a first failure the other ranks get this long to tell theirs; a rank stuck in a collective never will."""


@dataclass(frozen=True)
class Found:
    """What a function returned on each rank, and what the device saw meanwhile: how often, by text. Index = rank."""

    values: list[Any]
    races: list[dict[str, int]]
    host_waits: list[dict[str, int]]

    @property
    def all_races(self) -> list[str]:
        """The races of all ranks, each once."""
        return sorted({race for races in self.races for race in races})


class Runs(Protocol):
    """Live processes that `prepared` has made ready: `Processes`, or those of another test suite."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Returns `fn(*args)` of every rank; raises if one fails."""


class World:
    """Ranks whose devices run as `settings` say."""

    def __init__(self, processes: Runs, **settings: Any) -> None:
        self._processes = processes
        self._settings = settings

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_S, **kwargs: Any) -> Found:
        """`fn(*args, **kwargs)` on every rank. Raises what the processes raise, and AssertionError for a race."""
        __tracebackhide__ = True
        found = self.observe(fn, *args, timeout=timeout, **kwargs)
        races = "\n".join(found.all_races)
        assert not races, f"nothing puts these in an order ({self._settings}):\n{races}"
        return found

    def observe(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_S, **kwargs: Any) -> Found:
        """As `run`, but races are only returned."""
        __tracebackhide__ = True
        seen = self._processes.run(_watched, self._settings, fn, args, kwargs, timeout=timeout)
        values, races, waits = zip(*seen, strict=True)
        return Found(list(values), list(races), list(waits))


def _watched(
    settings: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, int], dict[str, int]]:
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    torch.accelerator.synchronize()
    simdevice.configure(**settings)
    simdevice.races(), simdevice.host_waits()
    try:
        value = fn(*args, **kwargs)
        waits = simdevice.host_waits()
        torch.accelerator.synchronize()  # what a worker fails at is raised here, at the latest
        return value, simdevice.races(), waits
    finally:
        simdevice.configure()


def prepare(rank: int, num_ranks: int) -> None:
    """Load the device in this process, which is `rank`, and make its own device the current one."""
    os.environ.setdefault("SIM_DEVICES", str(num_ranks))
    simdevice.load()
    torch.accelerator.set_device_index(rank)
    distributed_c10d.default_pg_timeout = TIMEOUT  # that of a mesh's groups


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish; `errors[rank]` is (type name, message)."""

    def __init__(self, task: str, errors: dict[int, tuple[str, str]], shown: dict[int, str]) -> None:
        self.errors = dict(sorted(errors.items()))
        parts = [f"rank {rank} failed: {shown.get(rank, message)}" for rank, (_, message) in self.errors.items()]
        super().__init__("\n".join([f"{task}:", *parts]))


class Processes:
    """`num_ranks` live processes with a device each. They start at the first `run`, and again after a failure."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_S) -> list[Any]:
        """Returns `fn(*args)` of every rank. Raises RanksFailed; the processes are killed then."""
        __tracebackhide__ = True
        name = getattr(args[1] if fn is _watched else fn, "__qualname__", str(fn))
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        try:
            if not self._workers:
                self._start()
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a rank that died meanwhile: `_replies` names it
                    pipe.send_bytes(task)
            replies = self._replies(timeout)
        except BaseException:
            self.stop()
            raise
        failed = {rank: reply for rank, reply in replies.items() if reply[0] is not None}
        if failed:
            self.stop()
            errors = {rank: (kind, value) for rank, (kind, value, _) in failed.items()}
            raise RanksFailed(name, errors, {rank: shown for rank, (_, _, shown) in failed.items()})
        return [replies[rank][1] for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []

    def _start(self) -> None:
        simdevice.build.build()  # once, and not by every rank that waits for the others
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["simdevice.ranks"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.num_ranks, self._store.port, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        # What a rank imports and compiles at its start is not in the time that a function may take.
        for rank, reply in self._replies(START_S).items():
            if reply[0] is not None:
                raise RanksFailed("the start", {rank: reply[:2]}, {rank: reply[2]})

    def _replies(self, timeout: float) -> dict[int, tuple[Any, Any, str]]:
        """What every rank has answered: the type of its error or None, its value or its message, and where."""
        deadline = time.monotonic() + timeout
        replies: dict[int, tuple[Any, Any, str]] = {}
        waiting = set(range(self.num_ranks))
        while waiting:
            ready = connection.wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted(waiting):
                if self._pipes[rank] not in ready:
                    continue
                waiting.discard(rank)
                try:
                    replies[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._workers[rank].join()
                    said = f"rank {rank} died, with exit code {self._workers[rank].exitcode}"
                    replies[rank] = ("Died", said, said)
                if replies[rank][0] is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting and all(kind is None for kind, _, _ in replies.values()):
            said = f"not finished after {timeout:g} s"
            replies |= dict.fromkeys(waiting, ("TimeoutError", said, said))
        return replies


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    """A rank's life: join the group, then answer one task after another until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and then ends us
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    try:
        prepare(rank, num_ranks)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        pipe.send_bytes(pickle.dumps((None, None, "")))
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))
    except EOFError:
        os._exit(0)


def _answer(task: bytes) -> bytes:
    gc.collect()
    try:
        sys.path[:], call = pickle.loads(task)
        fn, args = pickle.loads(call)
        torch.manual_seed(0)
        value = tree_map(lambda each: each.detach().cpu() if isinstance(each, torch.Tensor) else each, fn(*args))
        return pickle.dumps((None, value, ""))
    except BaseException as error:
        return pickle.dumps((type(error).__name__, str(error), traceback.format_exc()))
