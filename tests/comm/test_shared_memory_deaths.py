"""What ranks that share memory see when one of them dies, is stopped, or ends before the others.

The ranks here are processes of their own: those of `world` are killed together as soon as one has died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sherd.comm.host import shared_memory
from sherd.comm.host.shared_memory import SharedMemory
from sherd.errors import CommError
from tests.support.ranks import warm_up
from tests.support.ranks.process import be_quiet

MIB = 1 << 20
TIMEOUT_S, AT_ONCE_S = 30.0, 20.0
"""Not after the timeout, on a machine however busy."""


@dataclass
class End:
    """A rank's last words, and when it said them (one clock for all)."""

    said: Any = None
    when: float = 0.0
    pid: int = 0


def live(rank: int, num_ranks: int, port: int, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    be_quiet()
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        said = fn(lambda said: pipe.send(End(said, time.monotonic(), os.getpid())), *args)
    except CommError as error:
        said = str(error)
    if said is not None:
        pipe.send(End(said, time.monotonic(), os.getpid()))


def ends(num_ranks: int, fn: Callable[..., Any], *args: Any, patience: float = 40.0) -> list[End]:
    """`fn(tell, *args)` on each of new processes: what it told or returned last, or its error."""
    warm_up()
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [End() for _ in range(num_ranks)]
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=live, args=(rank, num_ranks, store.port, theirs, fn, args)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        deadline = time.monotonic() + patience
        waiting = dict(zip(pipes, range(num_ranks), strict=True))
        # A rank that is stopped says one thing and never ends.
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), 0.1):
                try:
                    found[waiting[pipe]] = pipe.recv()
                except EOFError:
                    del waiting[pipe]
            if sum(bool(each.said) for each in found) == num_ranks:
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in os.listdir("/dev/shm") if "sherd" in name]


def met(seconds: float = TIMEOUT_S) -> SharedMemory:
    transport = SharedMemory.meet(dist.group.WORLD, timeout=timedelta(seconds=seconds))
    assert transport is not None
    return transport


def kill_yourself(tell: Callable[[Any], None]) -> None:
    tell("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def collective(transport: SharedMemory, op: str) -> None:
    num_ranks, numel = dist.get_world_size(), MIB
    rest, rows, sizes = torch.ones(numel), torch.ones(numel * num_ranks), [numel] * num_ranks
    if op == "all-gather":
        transport.all_gather(rows, rest, sizes, False)
    elif op == "all-gather onto":
        call = transport.all_gather_onto(lambda rank, part: rest.copy_(part), rest, sizes, True)
        call.wait()
    elif op == "reduce-scatter":
        transport.reduce_scatter(rest, rows, sizes, False)
    else:
        transport.all_reduce(rows, False)


def dies_in_the_middle(tell: Callable[[Any], None], op: str) -> str:
    """Rank 1 dies at its fifth round, before it has posted it; most collectives here have many."""
    with mock.patch.object(shared_memory, "_CHUNK", MIB):
        transport = met()
        if dist.get_rank() == 1:
            fill, filled = shared_memory.Segment.view, []

            def fill_or_die(*args: Any) -> Any:
                filled.append(args)
                if len(filled) == 5:
                    kill_yourself(tell)
                return fill(*args)

            shared_memory.Segment.view = fill_or_die
        while True:
            collective(transport, op)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("op", ["all-gather", "all-gather onto", "reduce-scatter", "all-reduce"])
def test_the_death_of_a_rank_is_told_to_all_others_at_once(num_ranks, op):
    survivors = ends(num_ranks, dies_in_the_middle, op)
    victim = survivors.pop(1)
    assert victim.said == "killed"
    for each in survivors:
        assert f"rank 1 (process {victim.pid}) has died" in each.said
        assert "restart all ranks from the last checkpoint" in each.said
        assert each.when - victim.when < AT_ONCE_S


def dies_with_a_child(tell: Callable[[Any], None]) -> str | None:
    transport = met()
    collective(transport, "all-gather")
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            while True:
                time.sleep(60)
        tell(child)
        os.kill(os.getpid(), signal.SIGKILL)
    collective(transport, "all-reduce")
    return None


def test_a_child_that_holds_the_sockets_does_not_hide_the_death():
    survivor, victim, third = ends(3, dies_with_a_child)
    os.kill(victim.said, 0)  # it lives
    os.kill(victim.said, signal.SIGKILL)
    for each in (survivor, third):
        assert f"rank 1 (process {victim.pid}) has died" in each.said
        assert each.when - victim.when < AT_ONCE_S


def is_stopped(tell: Callable[[Any], None]) -> str | None:
    transport = met(seconds=1.0)
    if dist.get_rank() == 1:
        tell("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    collective(transport, "all-gather")
    return None


def test_a_stopped_rank_is_named_when_time_is_up():
    first, stopped, third = ends(3, is_stopped)
    for each in (first, third):
        assert f"waited 1 s for rank 1 (process {stopped.pid}) in the all-gather of 12,582,912 bytes" in each.said
        assert each.when - stopped.when > 0.5


def ends_early(tell: Callable[[Any], None]) -> str | None:
    transport = met()
    rank, sizes = dist.get_rank(), [MIB, MIB]
    rows, rest = torch.empty(2 * MIB), torch.full((MIB,), float(rank))
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    call = transport.all_gather(rows, rest, sizes, True)
    if rank == 0:
        call.wait()
        return "done"  # and the process ends
    while not has_ended(pids[0]):
        time.sleep(0.01)
    call.wait()
    assert rows.view(2, -1).mean(1).tolist() == [0.0, 1.0]
    call = transport.all_gather(rows, rest, sizes, True)
    call.wait()
    return None


def has_ended(pid: int) -> bool:
    """Though the process that started it may not have looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_a_rank_that_ends_early_stays_readable_and_is_then_missed():
    early, late = ends(2, ends_early)
    assert early.said == "done"
    assert f"rank 0 (process {early.pid}) has ended" in late.said
