"""The processes of one case: the ranks of its jobs, and who loads meanwhile."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
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

from sherd.checkpoint.ranks import Ranks
from sherd.errors import CheckpointError
from tests.checkpoint.kills import program
from tests.checkpoint.kills.cases import KILLS, Act, Case
from tests.checkpoint.kills.moments import Calls
from tests.support.ranks import warm_up
from tests.support.ranks.process import be_quiet, die_with_the_parent
from tests.support.versions import set_group_timeout

TIMEOUT_S = 10.0
SHORT_TIMEOUT_S = 3.0
"""Of the process groups."""
PATIENCE_S = 80.0
"""A process that has not ended so long after the begin hangs. Who makes a group with a rank that has died may need five
times the timeout: gloo tries to connect so often."""
STOPPED_S = 0.3
"""How long a stopped rank stays so, where the timeout is not to find it."""
NUMBERS_OF_A_JOB = 100
NUMBERS_OF_A_START = 1000
LOADER = -1
"""The number of who loads, among the jobs."""
_START = threading.Lock()


@dataclass(slots=True)
class End:
    """What one process has said, and how it has ended."""

    job: int
    rank: int
    process: Any
    pipe: Connection
    error: str = ""
    """The type of what it raised."""
    text: str = ""
    is_done: bool = False
    refused: dict[int, str] = field(default_factory=dict)
    """By number, the text of saves that were refused with a CheckpointError."""
    wrong: list[str] = field(default_factory=list)
    was_killed: bool = False
    exit_code: int | None = None
    stack: str = ""
    """Where it was, if it hung."""


@dataclass(slots=True)
class Ends:
    """What has become of all processes."""

    all: list[End]
    is_reached: bool = False
    """Whether the act has happened."""
    seconds: float = 0.0


# In the processes


def live(case: Case, start: int, job: int, rank: int, port: int, pipe: Connection, folder: str) -> None:
    """Be one rank of a job, which is started for the time `start`."""
    _begin(folder, f"{job}-{rank}")
    own = case.jobs[job]
    is_group = own.num_ranks > 1 or own.layout != "plain"
    if is_group:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=own.num_ranks, timeout=_patience(TIMEOUT_S))
    training = program.Training(own.layout, case.num_weights)
    if is_group:
        if not case.is_cold:
            Ranks()
        dist.barrier()
        if job == 0 and case.has_short_timeout and case.act is Act.STOP:
            set_group_timeout(_patience(SHORT_TIMEOUT_S))
    moment = case.moments[start]
    is_hit = job == 0 and moment.seconds is None and moment.rank in (None, rank)
    pipe.send(("begin",))
    Calls(f"{folder}/saved", case.act, moment if is_hit else None, lambda word: pipe.send((word,)))
    try:
        for at, step in enumerate(own.steps):
            number = start * NUMBERS_OF_A_START + job * NUMBERS_OF_A_JOB + at + 1
            program.report(f"{folder}/reports", "begun", job, rank, step, number)
            try:
                program.save(training, own, f"{folder}/saved", step, number)
            except CheckpointError as error:
                program.report(f"{folder}/reports", "refused", job, rank, step, number)
                pipe.send(("refused", number, str(error)))
            else:
                program.report(f"{folder}/reports", "done", job, rank, step, number)
    except BaseException as error:
        pipe.send(("error", type(error).__name__, f"{error}"))
        os._exit(1)
    pipe.send(("done",))
    if is_group:
        with contextlib.suppress(RuntimeError):  # a rank was killed as it left
            dist.barrier()
    os._exit(0)


def watch(case: Case, start: int, pipe: Connection, folder: str) -> None:
    """Load again and again while the others save."""
    _begin(folder, "loader")
    training = program.Training("plain", case.num_weights)
    pipe.send(("begin",))
    while not pipe.poll(0.005):
        done = program.reported(f"{folder}/reports", "done")
        seen = program.load(training, f"{folder}/saved")
        for wrong in seen.wrong:
            pipe.send(("wrong", f"step {seen.step}, number {seen.number}: {wrong}"))
        newest = max((step for _, _, step, _ in done), default=None)
        if newest is not None and (seen.step is None or seen.step < newest):
            pipe.send(("wrong", f"step {newest} was done, and {seen} was loaded"))
    pipe.send(("done",))
    os._exit(0)


def _begin(folder: str, name: str) -> None:
    die_with_the_parent()
    be_quiet()
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/{name}.stack", "w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    gc.freeze()


def _patience(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


# In the campaign's process


class Crew:
    """The processes of one start of a case, in `folder`."""

    def __init__(self, case: Case, start: int, folder: Path) -> None:
        self.case, self.folder = case, folder
        self._number, self._moment = start, case.moments[start]
        self.ends = Ends([])
        self._stores: list[dist.TCPStore] = []
        self._kill_at: float | None = None
        self._num_begun = 0

    def run(self) -> Ends:
        """Returns what has become of the processes."""
        begun = time.monotonic()
        try:
            for number, job in enumerate(self.case.jobs):
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                self._stores.append(store)
                for rank in range(job.num_ranks):
                    self._start(live, number, rank, number, rank, store.port)
            if self.case.has_loader:
                self._start(watch, LOADER, 0)
            self._listen(begun + PATIENCE_S)
        finally:
            self._end()
        self.ends.seconds = time.monotonic() - begun
        return self.ends

    def _start(self, function: Any, job: int, rank: int, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        with _START:
            warm_up()
            process = context.Process(target=function, args=(self.case, self._number, *args, theirs, str(self.folder)))
            process.start()
        theirs.close()
        self.ends.all.append(End(job, rank, process, ours))

    def _listen(self, deadline: float) -> None:
        waiting = {end.pipe: end for end in self.ends.all}
        while waiting and time.monotonic() < deadline:
            for pipe in connection.wait(list(waiting), 0.02):
                try:
                    self._note(waiting[pipe], *pipe.recv())
                except (EOFError, OSError):
                    del waiting[pipe]
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            if all(end.job == LOADER for end in waiting.values()):
                self._stop_loader()
        for end in waiting.values():
            end.stack = self._stack_of(end)

    def _note(self, end: End, what: str, *said: Any) -> None:
        match what:
            case "begin" if end.job == 0:
                self._num_begun += 1
                if self._num_begun == self.case.jobs[0].num_ranks and self._moment.seconds is not None:
                    self._kill_at = time.monotonic() + self._moment.seconds
            case "all" | "stop" | "reached" | "broken":
                self.ends.is_reached = True
                if what == "all":
                    self._kill()
                elif what == "stop":
                    stays = SHORT_TIMEOUT_S * 2 if self.case.has_short_timeout else STOPPED_S
                    self._kill_at = time.monotonic() + stays
            case "error":
                end.error, end.text = said
            case "done":
                end.is_done = True
            case "refused":
                end.refused[said[0]] = said[1]
            case "wrong":
                end.wrong.append(said[0])

    def _kill(self) -> None:
        """Kill the ranks of the first job that the act is about; a rank that is to be stopped first is."""
        self._kill_at = None
        act, hit = self.case.act, self._moment.rank
        for end in self.ends.all:
            if end.job != 0 or (act is not Act.KILL_ALL and end.rank != hit) or end.process.exitcode is not None:
                continue
            if act is Act.STOP and not self.ends.is_reached:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(end.process.pid, signal.SIGSTOP)
                self._kill_at = time.monotonic() + STOPPED_S
            else:
                end.process.kill()
        self.ends.is_reached = True

    def _stop_loader(self) -> None:
        for end in self.ends.all:
            if end.job == LOADER and not end.is_done:
                with contextlib.suppress(OSError):
                    end.pipe.send("stop")

    def _stack_of(self, end: End) -> str:
        if end.process.exitcode is not None:
            return "(ended)"
        os.kill(end.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        name = "loader" if end.job == LOADER else f"{end.job}-{end.rank}"
        return (self.folder / f"{name}.stack").read_text() or "(no stack)"

    def _end(self) -> None:
        patience = time.monotonic() + 5
        for end in self.ends.all:
            if not end.stack:
                end.process.join(max(0.0, patience - time.monotonic()))
            if end.process.exitcode is None:
                end.stack = end.stack or "(it has said all, and has not ended)"
                end.process.kill()
                end.process.join()
            end.exit_code = end.process.exitcode
            end.was_killed = end.exit_code == -signal.SIGKILL and not end.stack
            end.pipe.close()
        if self.case.act in KILLS:
            self.ends.is_reached |= any(end.was_killed for end in self.ends.all)
        self._stores.clear()
