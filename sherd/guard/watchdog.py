"""The watchdog: ends a collective that will never end, and says which rank is to blame.

On an accelerator the device waits for other ranks and the host does not, so nothing raises by itself. On the host a
killed rank closes its connections, unless a child that it has forked keeps them.

The board's thread asks, without waiting for the device, how long the device has been in a collective. If a process is
gone or the timeout has passed, the thread names the rank, raises a CommError in the main thread wherever that is, and
aborts the groups, so that a main thread in a wait for the device comes out. If it does not come out, the process ends.

    SHERD_TEAR_DOWN=0 torchrun ... train.py         names the rank, and leaves the process to the backend's own watchdog

A closed port (`Port`) shows that a process is gone. Silence does not: no thread of a process answers while a call in C
keeps the GIL.
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
from sherd.comm.failures import ENDED, ranks_in_short
from sherd.comm.groups import network_namespace
from sherd.errors import CommError
from sherd.guard.flight import LOOK_EVERY_S, OFTEN_UP_TO, Recorder

TEAR_DOWN = "SHERD_TEAR_DOWN"
EXIT_CODE = 75
"""The exit code of a process that the watchdog ends: EX_TEMPFAIL of sysexits.h, another try may succeed."""
GRACE_S = 5.0
"""How long the main thread has to raise before the process ends."""
DOUBT_AFTER_S = 1.0
"""A rank whose host or device waits so long looks whether the other processes still exist."""
CONNECTS_WITHIN_S = 0.2


class Port:
    """A listening port of this process, which the system closes when the process ends, and the other ranks' ports.

    No thread reads from a port. The system completes connections as long as the process exists, whatever it does.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, [socket.gethostname(), network_namespace()]
        self._listener = socket.create_server(("", 0))
        self._listener.setblocking(False)
        self.close = weakref.finalize(self, self._listener.close)
        # A forked child, such as a worker of a data loader, would hold the port open after this process.
        os.register_at_fork(after_in_child=self.close)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._unknown: set[int] = set()
        store.set(f"port/{rank}", json.dumps([*self._host, self._listener.getsockname()[1]]))

    def find(self, ranks: Sequence[int]) -> None:
        """Read the addresses of `ranks` from the store."""
        for rank in ranks:
            if rank not in self._addresses and self._store.check([key := f"port/{rank}"]):
                *host, number = json.loads(self._store.get(key))
                if host[0] == self._host[0] and host != self._host:
                    self._unknown.add(rank)  # another namespace under our host's name, which leads to ourselves
                self._addresses[rank] = ("127.0.0.1" if host == self._host else host[0]), number

    def accept(self) -> None:
        """Close the connections that others have made."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()

    def refused(self, ranks: Sequence[int]) -> list[int]:
        closed = []
        for rank in ranks:
            if rank in self._unknown or rank not in self._addresses:
                continue
            try:
                socket.create_connection(self._addresses[rank], CONNECTS_WITHIN_S).close()
            except ConnectionRefusedError:
                closed.append(rank)
            except OSError:
                self._unknown.add(rank)
        return closed

    def doubt(self, rank: int) -> None:
        """Stop probing `rank`: its port refuses although the process is alive (a firewall, another host)."""
        self._unknown.add(rank)


class Watchdog:
    """The watchdog of one rank, for the collectives of all meshes, which `recorder` knows.

    Attributes:
        is_on: there may be a device to watch, or this process has a port.
    """

    def __init__(self, recorder: Recorder, store: Store, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._port: Port | None = None
        self._next_look, self._has_acted = 0.0, False
        with contextlib.suppress(OSError):  # without a port only the timeout ends a wait
            self._port = Port(store, rank)
        self.is_on = torch.accelerator.is_available() or self._port is not None

    def look(self, has_store: bool) -> None:
        """End the collective that device or host wait in, if it will never end."""
        now = time.monotonic()
        if not self.is_on or self._has_acted or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        logs = [(log.device_waits_s, log) for log in self._recorder.logs()]
        # A host that waits raises by itself, and gets the time to do so.
        waits = [(max(waits_s, log.waits_s - GRACE_S), log) for waits_s, log in logs if waits_s is not None]
        waits = waits or [(log.waits_s, log) for _, log in logs if log.waits_s > DOUBT_AFTER_S]
        if not waits:
            return
        waits_s, log = max(waits, key=lambda wait: wait[0])
        peers = _next_of(self._rank, log.ranks)
        gone: list[int] = []
        with contextlib.suppress(RuntimeError):  # the store has just gone: the next look will not ask it
            gone = self._gone(peers, waits_s, has_store)
        ranks = ranks_in_short(log.ranks)
        where = f"rank {self._rank} has been waiting for {waits_s:.1f} s in a collective among ranks {ranks}"
        if gone:
            who = f"rank {gone[0]} has died" if len(gone) == 1 else f"ranks {gone} have died"
            text = f"{where}: {who}, or left the group: its process is gone. Look for the first error in its log"
            if self._recorder.has_ended(gone[0]):
                text = f"{where}: rank {gone[0]} {ENDED}"
        elif waits_s >= self._recorder.timeout_s and log.device_waits_s is not None:
            text = f"{where}, the timeout of the default group is {self._recorder.timeout_s:g} s"
        else:
            return
        remedy = "start all ranks again from the last checkpoint; the groups are of no more use"
        self.end(self._recorder.failed(log, f"{text}; {remedy}", absent=not gone))

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
        for log in self._recorder.logs():
            log.forget()

    def _gone(self, peers: Sequence[int], waits_s: float, has_store: bool) -> list[int]:
        """Returns those of `peers` whose processes are gone. Raises RuntimeError if the store is gone."""
        if self._port is None:
            return []
        if has_store:
            self._port.find(peers)
        self._port.accept()
        refused = self._port.refused(peers) if waits_s > DOUBT_AFTER_S else []
        if not refused or not has_store:
            return refused
        _, silent = self._recorder.answers(refused, f"ranks {refused} seem to be gone")
        for rank in set(refused) - silent:
            self._port.doubt(rank)
        return sorted(silent)

    def end(self, text: str) -> None:
        """Raise CommError in the main thread, wherever it is, which waits for ranks that will not come."""
        self._has_acted = True
        print(f"sherd: CommError: {text}", file=sys.stderr, flush=True)
        if os.environ.get(TEAR_DOWN) == "0":
            return
        for log in self._recorder.logs():
            log.lose(text)
        has_raised = threading.Event()
        # On a thread of its own, because an abort may hang as well.
        threading.Thread(target=_exit_unless, args=(has_raised,), name="sherd end", daemon=True).start()
        # The error comes before the abort, so that the program never sees what the device has after an abort:
        # test_the_main_thread_raises_where_it_is_and_goes_no_further.
        _raise_in_main_thread(text, has_raised)
        with contextlib.suppress(RuntimeError):
            abort_groups()


def _next_of(rank: int, ranks: Sequence[int]) -> list[int]:
    """Returns the `OFTEN_UP_TO` ranks after `rank` among `ranks`, around the end, so that every rank is watched."""
    start = ranks.index(rank) + 1
    return [*ranks[start:], *ranks[: start - 1]][:OFTEN_UP_TO]


def _raise_in_main_thread(text: str, has_raised: threading.Event) -> None:
    """Raise CommError in the main thread, before the next instruction behind the call that it is in."""

    # The interpreter makes the instance in the main thread, so its constructor tells that the error was raised.
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
