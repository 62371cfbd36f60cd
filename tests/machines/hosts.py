"""Two machines for a test: two network namespaces and a cable, so that nothing but the network is apart.

    host 0 | lo, eth0 10.77.0.1 |======== veth ========| eth0 10.77.0.2, lo | host 1

Nothing has a name that a second run could meet, and nothing is left behind: a namespace lives as long as the processes
in it, and the one that holds it ends when it can read no more from us, however we end.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"
_PR_SET_PDEATHSIG = 1
PATIENCE_S = 120
"""For what processes do, on a machine whose cores have other work too."""


class NotAllowed(Exception):
    """This machine does not let us make a namespace or a cable; the text says which command said what."""


class Hosts:
    """Two machines with a link between them."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._processes: list[Any] = []

    @property
    def pids(self) -> list[int]:
        """The process in each host's namespaces that holds them."""
        return [holder.pid for holder in self._holders]

    def build(self) -> None:
        """Raises NotAllowed."""
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._hold(["unshare", *user, "--net"])
        # Below the first one's user, so that one cable may join both.
        self._hold([*self._inside(0), "unshare", "--net"])
        self._ip(0, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(self.pids[1]))
        for host, address in enumerate(ADDRESSES):
            self._ip(host, "link", "set", "lo", "up")
            self._ip(host, "address", "add", f"{address}/24", "dev", INTERFACE)
            self._ip(host, "link", "set", INTERFACE, "up")

    def _hold(self, enter: Sequence[str]) -> None:
        """A process in a namespace of its own. It says a byte when it is there, and waits for the end of its input."""
        try:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            holder = subprocess.Popen([*enter, "sh", "-c", "echo; exec cat"], **pipes)
        except OSError as error:
            raise NotAllowed(f"{error.filename}: {error.strerror}") from error
        self._holders.append(holder)
        if not holder.stdout.read(1):
            raise NotAllowed(holder.stderr.read().decode().strip() or " ".join(enter))

    def _inside(self, host: int) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pids[host]), *user, "--net"]

    def _ip(self, host: int, *words: str) -> None:
        try:
            subprocess.run([*self._inside(host), "ip", *words], check=True, capture_output=True, text=True)
        except OSError as error:
            raise NotAllowed(f"{error.filename}: {error.strerror}") from error
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"ip {' '.join(words)}: {error.stderr.strip()}") from error

    def cut(self) -> None:
        """Nothing goes through any more, and nobody is told: no reset, no end of a connection."""
        self._ip(1, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """The link is as before."""
        self._ip(1, "link", "set", INTERFACE, "up")

    def start(self, host: int, function: Callable[..., None], *arguments: Any, output: Path | None = None) -> Any:
        """A process on `host` that does `function(*arguments)`, forked from where torch is imported."""
        from tests.support import ranks  # imports torch, which a host by itself has no use for

        ranks.warm_up()
        process = multiprocessing.get_context("forkserver").Process(
            target=_on_host, args=(self.pids[host], function, arguments, output)
        )
        process.start()
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what runs on the hosts, and the hosts."""
        for process in self._residents():
            # Ranks too, which a torchrun that is killed leaves behind.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._processes:
            process.join()
        for holder in self._holders:
            with contextlib.suppress(BrokenPipeError):
                holder.stdin.close()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()

    def _residents(self) -> list[int]:
        """The processes on the hosts, but for those that hold them."""
        hosts = {_network_of(pid) for pid in self.pids} - {None, _network_of(os.getpid())}
        every = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in every if _network_of(pid) in hosts and pid not in self.pids]


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None  # it has ended, or is none of ours


def _on_host(pid: int, function: Callable[..., None], arguments: Sequence[Any], output: Path | None) -> None:
    for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
        _enter(f"/proc/{pid}/ns/{kind}")
    # Not to outlive the tests, however they end: the fork server, our parent, ends with them.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of the tests on one machine
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
    function(*arguments)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    file = os.open(namespace, os.O_RDONLY)
    if libc.setns(file, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.close(file)


def waited_for(condition: Callable[[], Any], what: str) -> Any:
    """The first thing that is true of what `condition` returns."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not there after {PATIENCE_S} s: {what}"
        time.sleep(0.01)
    return found
