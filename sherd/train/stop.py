"""Signals that stop a process of `sherd train`, from its first line to its last. Loads no torch.

A launcher or a rank that is starting has nothing to save, and leaves at once, also out of `import torch` or out of a
wait for other ranks. Once it asks `stop()`, between steps, a signal only makes the answer True.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from sherd.train.codes import NOT_SAVED

LAUNCHER = "SHERD_LAUNCHER"  # in a rank's environment: the process that started it, if that is `sherd train`
WATCH_S = 0.5
SAVING_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's own name for how long ranks may take to save


def is_rank() -> bool:
    """Returns whether a launcher has started this process as a rank.

    RANK alone does not say so: some schedulers set it for an entire pod, which is to start the ranks of its machine.
    """
    return "RANK" in os.environ and ("LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ)


def launcher() -> int | None:
    """Returns the process of the `sherd train` that has started this rank; None under torchrun, and in no rank."""
    return int(os.environ[LAUNCHER]) if is_rank() and LAUNCHER in os.environ else None


def by_hand() -> bool:
    """Returns whether this process speaks for its run: any but a rank that another one speaks for."""
    return not is_rank() or (os.environ["RANK"] == "0" and launcher() is None)


def say(line: str) -> None:
    """Write a line to stderr; nothing where that is gone, as after a terminal was closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"sherd train: {line}\n".encode())


class Stop:
    """Call it to know whether SIGTERM, SIGHUP or Ctrl-C has come, or the parent has ended.

    As a context it listens. Until it is called for the first time, each of them ends the process with NOT_SAVED.
    A SIGHUP that came ignored stays so: nohup wants it.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[int, float]] = []  # signals, in order, and when (time.monotonic)
        self._asked = False
        self.before_leaving: list[Callable[[], object]] = []  # done first when a signal ends the process
        # A rank outlives no launcher; one whose launcher was gone before this line is noticed too.
        self._parent = launcher() or os.getppid() if is_rank() else 0

    def __enter__(self) -> Stop:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._hear)
        # The system's handler writes there at once; Python's own waits for the main thread, which may be deep in C++.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def __call__(self) -> bool:
        self._asked = True
        return bool(self.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append((number, time.monotonic()))

    def _watch(self) -> None:
        heard = selectors.DefaultSelector()  # `select.select` takes descriptors below 1024 only
        heard.register(self._read, selectors.EVENT_READ)
        while True:
            if heard.select(WATCH_S):
                numbers = os.read(self._read, 64)
                if not numbers:
                    heard.close()
                    return
                if not self._asked and set(numbers) & set(self._handlers):
                    self._leave()
            if self._parent and os.getppid() != self._parent:
                self._parent = 0
                # A rank that cannot save, as it waits for one that is gone, ends too: the system sees to that.
                signal.setitimer(signal.ITIMER_REAL, float(os.environ.get(SAVING_S, "30")))
                os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self) -> NoReturn:
        for action in self.before_leaving:
            action()
        if by_hand():
            say("stopped before the first step; nothing new was saved")
        os._exit(NOT_SAVED)


def leave(code: int) -> NoReturn:
    """End a rank's process.

    Not through the interpreter's own end: a thread of gloo's or NCCL's that lets go of the last tensor of a finished
    collective asks for the interpreter, and one that comes while it is taken down is ended by force, in C++ code that
    does not allow that: "terminate called without an active exception", in one of fifty runs on a busy machine.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except Exception:
        traceback.print_exc()
    os._exit(code)
