"""The end of a process: gloo's threads get the time to drop the tensors of their last collective.

A thread of gloo drops a collective's tensors a moment after it reports the collective as done. Dropping the last
reference to a tensor takes the GIL. A Python that is being finalized ends any thread that asks for the GIL, and the C++
around that thread then says "terminate called without an active exception" and raises SIGABRT (with torch 2.13, under
its own FSDP2 too, in 2 of 50 processes on a busy machine; with this wait in none of 80).
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["wait_for_gloo_at_exit"]

MOST = 1.0  # seconds
THREADS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"  # torch's name for these threads


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Have the process wait for gloo's threads at its end, before Python is finalized."""
    atexit.register(_wait)


def _wait() -> None:
    latest = time.monotonic() + MOST
    while time.monotonic() < latest:
        time.sleep(0.002)  # releases the GIL, for which such a thread may be waiting
        if not is_at_work(NAME):
            return


def is_at_work(name: str) -> bool:
    """Returns whether a thread called `name` of this process is running or ready to run; on Linux only."""
    try:
        threads = [(thread / "stat").read_text() for thread in THREADS.iterdir()]
    except OSError:  # no such folder, or a thread has ended meanwhile
        return False
    # 1234 (name) S ...
    return any(
        name == text.partition("(")[2].rpartition(")")[0] and text.rpartition(")")[2][1] == "R" for text in threads
    )
