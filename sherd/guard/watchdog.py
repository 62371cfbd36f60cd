"""The watchdog: on an accelerator the device waits for other ranks and the host does not, so nothing raises by itself.
On the host a killed rank closes its connections, unless a child that it has forked keeps them.

The board's thread looks, without waiting for the device, for how long it has been in a collective. If that will not
end, because a process is gone or the timeout has passed, the thread says which rank is to blame, has the main thread
raise that as a CommError where it is, and aborts the groups, so that a main thread which waits for the device comes
out. A process whose main thread does not come out ends.

    SHERD_TEAR_DOWN=0 torchrun ... train.py         names the rank, and leaves the process to the backend's own watchdog

A process is known to be gone by its port (`Port`), not by its silence: a thread of Python is silent, too, while a C
call of another one keeps the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import torch

from sherd._torch import Store, abort_groups
from sherd.comm.failures import in_short
from sherd.comm.host.neighbours import network
from sherd.errors import CommError
from sherd.guard.flight import LOOK_EVERY_S, OFTEN_UP_TO, Recorder

TEAR_DOWN = "SHERD_TEAR_DOWN"
EXIT_CODE = 75
"""Of a process that is ended: EX_TEMPFAIL of sysexits.h, another try may succeed."""
GRACE_S = 5.0
"""The main thread has as long to raise, before the process is ended."""
DOUBT_AFTER_S = 1.0
"""A rank that waits so long, or whose device does, looks whether the others still exist."""
CONNECTS_WITHIN_S = 0.2


class Port:
    """A port that the system closes with this process, and how others find out that it is closed.

    Nobody reads from it. The system completes connections for as long as the process exists, whatever it does.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, [socket.gethostname(), network()]
        self._listener = socket.create_server(("", 0))
        self._listener.setblocking(False)
        self._close = weakref.finalize(self, self._listener.close)
        # A forked child, which loads data, would hold it open.
        os.register_at_fork(after_in_child=self._close)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._unknown: set[int] = set()
        store.set(f"port/{rank}", json.dumps([*self._host, self._listener.getsockname()[1]]))

    def find(self, ranks: Sequence[int]) -> None:
        """Read the addresses of `ranks`, as long as there is a store that has them."""
        for rank in ranks:
            if rank not in self._addresses and self._store.check([key := f"port/{rank}"]):
                *host, number = json.loads(self._store.get(key))
                if host[0] == self._host[0] and host != self._host:
                    self._unknown.add(rank)  # a name that leads to ourselves
                self._addresses[rank] = ("127.0.0.1" if host == self._host else host[0]), number

    def accept(self) -> None:
        """Let go of connections that others have made."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()

    def refused(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of `ranks` whose ports are closed. One that cannot be reached at all is not among them."""
        found = []
        for rank in ranks:
            if rank in self._unknown or rank not in self._addresses:
                continue
            try:
                socket.create_connection(self._addresses[rank], CONNECTS_WITHIN_S).close()
            except ConnectionRefusedError:
                found.append(rank)
            except OSError:
                self._unknown.add(rank)
        return found

    def doubt(self, rank: int) -> None:
        """Ask `rank` no more: its port seems closed, and it is there. A firewall answers so, or another host."""
        self._unknown.add(rank)

    def close(self) -> None:
        """Close the port."""
        self._close()


class Watchdog:
    """The watchdog of one rank, for all that its device does; `recorder` knows the collectives of all meshes.

    Attributes:
        is_on: there may be a device to watch, or a port tells of this process.
    """

    def __init__(self, recorder: Recorder, store: Store, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._port: Port | None = None
        self._next_look, self._has_acted = 0.0, False
        with contextlib.suppress(OSError):  # where there is no port to be had, the timeout is what counts
            self._port = Port(store, rank)
        self.is_on = torch.accelerator.is_available() or self._port is not None

    def look(self, has_store: bool) -> None:
        """See whether device or host wait for what will not come; then say why, and end it."""
        now = time.monotonic()
        if not self.is_on or self._has_acted or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        waits = [(each.device_waits_s, each) for each in self._recorder.sources()]
        # Where it is the host that waits, it is to raise by itself, and gets the time to.
        found = [(max(waits_s, each.waits_s - GRACE_S), each) for waits_s, each in waits if waits_s is not None]
        found = found or [(each.waits_s, each) for _, each in waits if each.waits_s > DOUBT_AFTER_S]
        if not found:
            return
        waits_s, source = max(found, key=lambda each: each[0])
        peers = _next_of(self._rank, source.ranks)
        gone: list[int] = []
        with contextlib.suppress(RuntimeError):  # the store has just gone: the next look will not ask it
            gone = self._gone(peers, waits_s, has_store)
        ranks = in_short(source.ranks)
        where = f"rank {self._rank} has been waiting for {waits_s:.1f} s in a collective among ranks {ranks}"
        if gone:
            who = f"rank {gone[0]} has died" if len(gone) == 1 else f"ranks {gone} have died"
            text = f"{where}: {who}, or left the group: no such process is there. Look for the first error in its log"
        elif waits_s >= self._recorder.timeout_s and source.device_waits_s is not None:
            text = f"{where}, the timeout of the default group is {self._recorder.timeout_s:g} s"
        else:
            return
        self._has_acted = True
        remedy = "start all ranks again from the last checkpoint; the groups are of no more use"
        self._end(self._recorder.failed(source, f"{text}; {remedy}", absent=not gone))

    def close(self) -> None:
        """Watch nothing any more."""
        if self._port is not None:
            self._port.close()
        for source in self._recorder.sources():
            source.forget()

    def _gone(self, peers: Sequence[int], waits_s: float, has_store: bool) -> list[int]:
        """Returns those of `peers` whose processes are gone. Raises RuntimeError if the store is gone by now."""
        if self._port is None:
            return []
        if has_store:
            self._port.find(peers)
        self._port.accept()
        refused = self._port.refused(peers) if waits_s > DOUBT_AFTER_S else []
        if not refused or not has_store:
            return refused
        silent = self._recorder.silent(refused, f"ranks {refused} seem to be gone")
        for rank in set(refused) - silent:
            self._port.doubt(rank)
        return sorted(silent)

    def _end(self, text: str) -> None:
        print(f"sherd: CommError: {text}", file=sys.stderr, flush=True)
        if os.environ.get(TEAR_DOWN) == "0":
            return
        for source in self._recorder.sources():
            source.lose(text)
        has_raised = threading.Event()
        # A thread of its own, for an abort may hang as well.
        threading.Thread(target=_exit_unless, args=(has_raised,), name="sherd end", daemon=True).start()
        # First the error, then the abort: behind it the device has results that are none, and nobody is to see them.
        _raise_in_main_thread(text, has_raised)
        with contextlib.suppress(RuntimeError):
            abort_groups()


def _next_of(rank: int, ranks: Sequence[int]) -> list[int]:
    """Returns those that come after `rank` among `ranks`, around the end: all others, if they are not too many to ask.
    Each rank has others that look after it."""
    start = ranks.index(rank) + 1
    return [*ranks[start:], *ranks[: start - 1]][:OFTEN_UP_TO]


def _raise_in_main_thread(text: str, has_raised: threading.Event) -> None:
    """Raise CommError in the main thread, before it goes on behind the call that it is in."""

    class Lost(CommError):
        def __init__(self) -> None:
            super().__init__(text)
            has_raised.set()

        def __reduce__(self) -> tuple[type[CommError], tuple[str]]:
            return CommError, (text,)

    Lost.__name__ = Lost.__qualname__ = CommError.__name__
    Lost.__module__ = CommError.__module__
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Lost))


def _exit_unless(has_raised: threading.Event) -> None:
    if not has_raised.wait(GRACE_S):
        print(f"sherd: the main thread has not come out for {GRACE_S:g} s, so this process ends", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_CODE)
