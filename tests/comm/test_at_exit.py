"""A process that ends waits for threads that are still at work, whose end would abort it."""

import ctypes
import sys
import threading
import time
import weakref
from unittest import mock

import pytest

from sherd.comm.groups import is_at_work
from sherd.errors import CommError
from sherd.guard import board

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


class BusyBoard:
    """A board whose first look ends when `may_end` is set, as one at a store that answers late."""

    is_over = False
    pause_s = 0.0

    def __init__(self):
        self.num_begun, self.begun, self.may_end = 0, threading.Event(), threading.Event()

    def look(self):
        self.num_begun += 1
        self.begun.set()
        self.may_end.wait()


def test_a_process_that_ends_waits_for_a_look_at_the_board_and_begins_no_other():
    busy = BusyBoard()
    with mock.patch.object(board, "_process_ends", threading.Event()):
        looking = threading.Thread(target=board._watch, args=(weakref.ref(busy), 0.0))
        looking.start()
        busy.begun.wait()
        ending = threading.Thread(target=board._end, args=(looking,))
        ending.start()
        board._process_ends.wait()
        assert ending.is_alive()
        busy.may_end.set()
        ending.join()
        assert not looking.is_alive()
    assert busy.num_begun == 1


def test_the_watchdogs_error_in_a_process_that_ends_is_told_once():
    """It comes in the main thread, wherever that is: here it waits for the board's thread."""
    with mock.patch.object(board, "_process_ends", threading.Event()):
        looking = mock.Mock(**{"join.side_effect": CommError("rank 1 has died")})
        board._end(looking)
        assert looking.join.called
