"""Ranks that live for one training each, and what is left of them: what each says, how it ends, what it leaves behind.

All are forked from the server that has torch imported, which takes a hundredth of a second. The store lives here, as
torchrun's does, or with rank 0, where rank 0 was asked to keep it or ranks are on two hosts.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.comm import groups, transports
from sherd.comm.groups import forget_destroyed
from tests.faults.builder import LINK, MOMENT_S, SILENT, Fault, Kind, Probe
from tests.faults.program import Setting, trained
from tests.machines.hosts import ADDRESSES, INTERFACE, Hosts
from tests.support.ranks import warm_up
from tests.support.ranks.process import be_quiet, die_with_the_parent, forget_meshes
from tests.support.versions import set_group_timeout

TIMEOUT_S = 10.0
"""Of the process groups, where nobody should have to wait for so long."""
SHORT_TIMEOUT_S = 4.0
"""Where nothing else ends the wait."""
PATIENCE_S = 30.0
"""Beyond the timeout. A rank that has not ended so long after the fault hangs. A rank that comes to make a group with
others that have ended may need five times the timeout: gloo tries to connect so often."""
SHORT_PATIENCE_S = 8.0
"""Where it is known that ranks may hang."""
START_S = 90.0
"""For all that comes before the fault, on a machine however busy."""
TIDY_S = 3.0
_START = threading.Lock()


@dataclass(frozen=True, slots=True)
class Case:
    """One training with one fault."""

    setting: Setting
    fault: Fault | None
    keeps_store: bool = False
    """Whether the store lives with rank 0."""

    @property
    def timeout_s(self) -> float:
        return SHORT_TIMEOUT_S if self.fault is not None and self.fault.kind in SILENT else TIMEOUT_S

    @property
    def patience_s(self) -> float:
        """How long after the fault a rank hangs that has not ended."""
        compares = self.is_across_hosts and self.setting.divergence == "error"
        return self.timeout_s + (SHORT_PATIENCE_S if compares else PATIENCE_S)

    @property
    def is_across_hosts(self) -> bool:
        return self.fault is not None and self.fault.kind in LINK

    def host_of(self, rank: int) -> int:
        """Returns which of two hosts has that rank: each has half of the ranks, the first one rank more if need be."""
        return int(rank >= (self.setting.num_ranks + 1) // 2)

    def __str__(self) -> str:
        store = ", store with rank 0" if self.keeps_store else ""
        return f"{self.setting}{store}; {self.fault}"


@dataclass(slots=True)
class End:
    """What one rank has said, and how it has ended."""

    values: dict[str, Tensor] | None = None
    error: str | None = None
    """The type of what it raised."""
    text: str = ""
    when: float = 0.0
    """When it came to its result or its error, by the clock that all processes share."""
    fault_at: float | None = None
    exit_code: int | None = None
    is_stuck: bool = False
    stack: str = ""
    left: list[str] | None = None
    """Threads and open files that it had more than at its start, after it has destroyed the process group. None after
    an error, which its process must not survive."""


@dataclass(slots=True)
class Ends:
    """What has become of all ranks."""

    of_rank: list[End]
    left: list[str] = field(default_factory=list)
    """Files, memory and processes that are left when all are gone."""
    fault_at: float | None = None


# In a rank's process


def live(case: Case, rank: int, address: str, port: int, pipe: Connection, folder: str) -> None:
    """Train, say what came of it, tidy up and say what could not be."""
    die_with_the_parent()
    be_quiet()
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/{rank}.stack", "w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.setting.num_ranks), LOCAL_RANK=str(rank))
    if case.is_across_hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    gc.freeze()
    threads, files = _threads(), _files()

    def tell() -> None:
        pipe.send(("fault", time.monotonic()))
        if case.is_across_hosts:
            pipe.recv()  # the link is cut

    probe = Probe(case.fault, rank, tell, late_s=case.timeout_s + 2)
    code = 0
    try:
        _say_end(case, rank, address, port, pipe, probe, folder)
    except BaseException as error:
        pipe.send(("error", type(error).__name__, str(error), time.monotonic()))
        code = error.code if isinstance(error, SystemExit) else 1
    if code == 0:
        dist.destroy_process_group()
        # torch's store leaves a pipe of its server open.
        left = _left(threads, files) if not (case.keeps_store and rank == 0) else []
        pipe.send(("left", left))
    atexit._run_exitfuncs()  # a forked process leaves them out
    os._exit(code)


def _say_end(case: Case, rank: int, address: str, port: int, pipe: Connection, probe: Probe, folder: str) -> None:
    serves = rank == 0 and port == 0
    store = dist.TCPStore(address, port, is_master=serves, wait_for_workers=False)
    if serves:
        pipe.send(("port", store.port))
    patience = timedelta(seconds=START_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.setting.num_ranks, timeout=patience)
    dist.barrier()
    store.set_timeout(timedelta(seconds=case.timeout_s))  # all are there
    set_group_timeout(timedelta(seconds=case.timeout_s))
    values = trained(case.setting, probe, Path(folder))
    pipe.send(("values", pickle.dumps({name: each.tolist() for name, each in values.items()}), time.monotonic()))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _files() -> set[str]:
    return {_name_of(number) for number in os.listdir("/proc/self/fd")}


def _name_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""  # that of the listing itself


def _left(threads: int, files: set[str]) -> list[str]:
    """What is left a moment after everything was dropped: threads need one to end."""
    begun, left = time.monotonic(), ["?"]
    # sherd does that when it makes the next mesh and transport.
    forget_destroyed(transports._known)
    for known in list(groups._meshes.values()):
        forget_destroyed(known)
    while left and time.monotonic() - begun < TIDY_S:
        forget_meshes()
        left = [f"file {name}" for name in sorted(_files() - files) if name]
        if _threads() > threads:
            left += [f"thread {_comm(name)}" for name in os.listdir("/proc/self/task")]
        if left:
            time.sleep(0.02)
    return left


def _comm(name: str) -> str:
    try:
        return Path(f"/proc/self/task/{name}/comm").read_text().strip()
    except OSError:
        return ""


# In the tests' process


class Crew:
    """The ranks of one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.ends = Ends([End() for _ in range(case.setting.num_ranks)])
        self._hosts = Hosts() if case.is_across_hosts else None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(self) -> Ends:
        """Returns what has become of the ranks. Raises NotAllowed where this machine has no hosts to offer."""
        self.folder.mkdir(parents=True)
        try:
            if self._hosts is not None:
                self._hosts.build()
            self._start()
            self._listen()
        finally:
            self._end()
        self._look_around()
        return self.ends

    def _start(self) -> None:
        port, address = 0, ADDRESSES[0] if self._hosts is not None else "127.0.0.1"
        if not self.case.keeps_store and self._hosts is None:
            self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        for rank in range(self.case.setting.num_ranks):
            self._start_rank(rank, address, port)
            if port == 0:
                assert self._pipes[0].poll(START_S), "rank 0 does not come to serve the store"
                _, port = self._pipes[0].recv()

    def _start_rank(self, rank: int, address: str, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        args = (self.case, rank, address, port, theirs, str(self.folder))
        with _START:
            warm_up()
            if self._hosts is not None:
                process = self._hosts.start(self.case.host_of(rank), live, *args)
            else:
                process = context.Process(target=live, args=args)
                process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _listen(self) -> None:
        """Until all ranks have ended, or time is up."""
        deadline = time.monotonic() + START_S
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        wake_at, is_awake = None, False
        while waiting and time.monotonic() < deadline:
            for pipe in connection.wait(list(waiting), 0.05):
                try:
                    self._note(waiting[pipe], *pipe.recv())
                except (EOFError, OSError):
                    del waiting[pipe]
            if self.ends.fault_at is None or is_awake:
                continue
            if wake_at is None:
                deadline, wake_at = time.monotonic() + self.case.patience_s, self._act()
            others = [end for rank, end in enumerate(self.ends.of_rank) if rank != self.case.fault.rank]
            if time.monotonic() > wake_at or all(end.when for end in others):
                is_awake = self._wake()
        for rank in waiting.values():
            self.ends.of_rank[rank].is_stuck = True
            self.ends.of_rank[rank].stack = self._stack_of(rank)

    def _note(self, rank: int, what: str, *said: Any) -> None:
        end = self.ends.of_rank[rank]
        if what == "fault":
            self.ends.fault_at = said[0]
        elif what == "values":
            end.values = {name: torch.tensor(each) for name, each in pickle.loads(said[0]).items()}
            end.when = said[1]
        elif what == "error":
            end.error, end.text, end.when = said
        else:
            end.left = said[0]

    def _act(self) -> float:
        """What the rank with the fault cannot do. Returns when that is to be undone."""
        if self._hosts is not None:
            self._hosts.cut()
            self._pipes[self.case.fault.rank].send("cut")
        is_short = self.case.fault.kind in (Kind.PAUSE, Kind.BREAK)
        return time.monotonic() + (MOMENT_S if is_short else self.case.timeout_s + PATIENCE_S / 2)

    def _wake(self) -> bool:
        """Undo it. Returns False if it has not happened yet."""
        kind = self.case.fault.kind
        if kind is Kind.BREAK:
            self._hosts.mend()
        if kind not in (Kind.STOP, Kind.PAUSE):
            return True
        pid = self._processes[self.case.fault.rank].pid
        if not _is_stopped(pid):
            return False
        os.kill(pid, signal.SIGCONT)
        return True

    def _stack_of(self, rank: int) -> str:
        if self._processes[rank].exitcode is not None:
            return ""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return (self.folder / f"{rank}.stack").read_text()

    def _end(self) -> None:
        patience = time.monotonic() + 30  # for an exit on a busy machine
        for process, end in zip(self._processes, self.ends.of_rank, strict=False):
            if not end.is_stuck:
                process.join(max(0.0, patience - time.monotonic()))
            end.exit_code = process.exitcode
            if process.exitcode is None:
                process.kill()
                process.join()
                if not end.is_stuck:
                    self.ends.left.append("a process that has said all")
        for pipe in self._pipes:
            pipe.close()
        if self._hosts is not None:
            self._hosts.close()
        self._store = None

    def _look_around(self) -> None:
        found = {path.name for path in self.folder.iterdir()}
        allowed = {f"{rank}.{kind}" for rank in range(len(self._pipes)) for kind in ("ckpt", "stack")} | {"whole"}
        self.ends.left += [f"file {name}" for name in sorted(found - allowed)]
        self.ends.left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "sherd" in name]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True  # it has ended, and a signal does nothing
