"""What stands for two machines is apart, and gone afterwards; and a machine that does not allow it says why."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sherd.train.ranks import interface_to
from tests.machines.hosts import ADDRESSES, INTERFACE, PATIENCE_S, Hosts, NotAllowed, waited_for

ROOT = Path(__file__).parent.parent.parent


def told(pipe):
    pipe.send((interface_to(ADDRESSES[0]), interface_to("127.0.0.1"), os.readlink("/proc/self/ns/net")))


def asleep(pipe):
    child = subprocess.Popen(["sleep", "100"])
    pipe.send(child.pid)
    child.wait()


def has_ended(pid):
    """Whoever has adopted it may yet have to take note."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def sent(hosts, host, function):
    ours, theirs = multiprocessing.Pipe()
    hosts.start(host, function, theirs)
    theirs.close()
    assert ours.poll(PATIENCE_S)
    return ours.recv()


def test_hosts_share_nothing_but_their_link_and_leave_nothing_not_even_what_a_killed_process_had_started(hosts):
    ways = [sent(hosts, host, told) for host in (0, 1)]
    assert [way[:2] for way in ways] == [(INTERFACE, None)] * 2
    assert len({ways[0][2], ways[1][2], os.readlink("/proc/self/ns/net")}) == 3
    child = sent(hosts, 0, asleep)
    assert Path(f"/proc/{child}").exists()
    holders = hosts.pids
    hosts.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)
    waited_for(lambda: has_ended(child), "the end of what a process on the host had started")


def test_hosts_end_with_the_process_that_made_them_even_if_it_is_killed(hosts):
    program = "import sys; from tests.machines.hosts import Hosts; hosts = Hosts(); hosts.build(); "
    program += "print(*hosts.pids, flush=True); sys.stdin.read()"
    maker = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with maker:
        holders = [int(word) for word in maker.stdout.readline().split()]
        assert len(holders) == 2
        maker.kill()
    waited_for(lambda: all(has_ended(pid) for pid in holders), "the end of both hosts")


def test_where_there_can_be_no_hosts_the_reason_is_told(monkeypatch):
    popen = subprocess.Popen
    refused = "echo 'unshare failed: Operation not permitted' >&2; exit 1"
    for instead, reason in (
        (["/absent-program"], "/absent-program: No such file or directory"),
        (["sh", "-c", refused], "unshare failed: Operation not permitted"),
    ):
        made = Hosts()
        monkeypatch.setattr(
            subprocess, "Popen", lambda words, instead=instead, **pipes: popen([*instead, *words[1:]], **pipes)
        )
        try:
            with pytest.raises(NotAllowed, match=f"^{reason}$"):
                made.build()
        finally:
            made.close()
