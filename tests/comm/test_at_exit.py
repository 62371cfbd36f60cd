"""A process that ends waits for threads that are still at work by their name."""

import ctypes
import sys
import threading
import time

import pytest

from sherd.comm.groups import is_at_work

NAME = "a thread (odd)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads are doing")
def test_a_thread_is_at_work_while_it_runs_and_not_while_it_waits():
    busy, waits, done = threading.Event(), threading.Event(), threading.Event()

    def run():
        ctypes.CDLL(None).prctl(15, NAME.encode(), 0, 0, 0)  # PR_SET_NAME
        busy.set()
        ctypes.CDLL(None).usleep(1)
        while not waits.is_set():
            sum(range(10_000))
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        busy.wait()
        assert _becomes(True)
        waits.set()
        assert _becomes(False)
    finally:
        waits.set()
        done.set()
        thread.join()
    assert _becomes(False)  # join() returns a moment before the system's thread has ended


def _becomes(expected):
    """Whether that is seen soon: a thread that runs may be looked at while it waits for the interpreter."""
    latest = time.monotonic() + 30
    while time.monotonic() < latest:
        if is_at_work(NAME) is expected:
            return True
        time.sleep(0.001)
    return False
