"""Programs of tests in processes of their own, without a Python each that imports torch anew.

They are forked from the server that the ranks come from, which has it imported, and torchrun forks its ranks in turn.
Importing torch takes seconds, far longer than what such a program is asked to do.
"""

import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.support.ranks import packed_task, warm_up
from tests.support.ranks.failures import Failure
from tests.support.ranks.process import answer, be_quiet, die_with_the_parent, forget_the_server

TIMEOUT_S = 120
POPEN = subprocess.Popen


def answer_of(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a process of its own. Raises AssertionError with what it raised there."""
    __tracebackhide__ = True
    warm_up()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, packed_task(function, args, {})))
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"{function.__name__} has no answer after {TIMEOUT_S} s"
        said = pickle.loads(ours.recv_bytes())
    finally:
        process.kill()
        process.join()
    assert not isinstance(said, Failure), said.shown
    return said.value


def _answer(pipe: Connection, function: Callable[..., Any], task: bytes) -> None:
    """`function` has come by itself too, so that by now all that it needs is imported."""
    gc.freeze()  # collections leave that alone
    torch.set_num_threads(1)
    forget_the_server()
    be_quiet()
    pipe.send_bytes(answer(task))


def torchrun(words: Sequence[str], environment: dict[str, str]) -> None:
    """Be the program torchrun, called with `words`. Its ranks are forks of this process."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.environ.pop("RANK", None)
    from torch.distributed.run import main

    # Where its agent would start a Python.
    with mock.patch.object(SubprocessHandler, "_popen", lambda _, words, environment: _Fork(words, environment)):
        main(list(words))


def start(function: Callable[..., None], *args: Any, folder: Path, output: Path) -> Any:
    """A process that does `function(*args)` in `folder`; what it says goes to `output`, and to `output`.err."""
    warm_up()
    process = multiprocessing.get_context("forkserver").Process(target=_say, args=(folder, output, function, args))
    process.start()
    return process


def _say(folder: Path, output: Path, function: Callable[..., None], args: Sequence[Any]) -> None:
    os.chdir(folder)
    forget_the_server()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, also where the tests run under nohup
    for number, path in ((1, output), (2, output.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    function(*args)


def sherd(words: Sequence[str], environment: dict[str, str]) -> None:
    """Be the command `sherd`, called with `words`. Its ranks are forks of this process, and outlive it if they can."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.environ.pop("RANK", None)
    from sherd.cli import main as cli
    from sherd.train import launch

    def rank(words: Sequence[str], *, env: dict[str, str], **_: Any) -> _Fork:
        return _Fork(words, env, dies_with_us=False)

    with mock.patch.object(launch.subprocess, "Popen", rank):
        sys.exit(cli.main(words))


class _Fork:
    """What launchers ask a `subprocess.Popen` for."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], dies_with_us: bool = True) -> None:
        task = (words, environment, dies_with_us)
        self._process = multiprocessing.get_context("fork").Process(target=_be, args=task)
        self._process.start()
        assert self._process.pid is not None, "started"
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
        return self._process.exitcode


def _be(words: Sequence[str], environment: dict[str, str], dies_with_the_parent: bool) -> None:
    """Do what `python -u words` does."""
    if dies_with_the_parent:
        die_with_the_parent()
    subprocess.Popen = POPEN  # a launcher has `_Fork` in its place, where a rank may start other programs
    os.setsid()  # launchers stop a rank with all that it has started
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's own are inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    assert list(words[:2]) == [sys.executable, "-u"], words
    if words[2] == "-m":
        sys.argv = list(words[3:])
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words[2:])
        runpy.run_path(words[2], run_name="__main__")
