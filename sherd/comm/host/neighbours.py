"""Neighbours, the other ranks on this host: a socket to each of them, and the short messages that go through it.

A message says *where* bytes are, in a segment that all have mapped; it never carries them:

    post    what this rank asks for as its n-th round, and where the bytes for the others are
    read    "I have read all rounds before n"; every post says that too
    abort   "I gave up, and why"
    leave   "I end normally"

Messages between two ranks arrive complete and in order. The death of a rank is noticed at once: its sockets end, and
where a forked child still holds them, the kernel tells of the process itself (`pidfd`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sherd.comm.failures import ENDED, ends_well
from sherd.comm.groups import network_namespace
from sherd.comm.host.segments import Segment
from sherd.comm.objects import all_gather_objects
from sherd.errors import CommError

_POST, _READ, _ABORT, _LEAVE = range(4)
_MESSAGE = struct.Struct("=BBBBIQQQQ")  # kind, then the fields of Post
_HELLO = struct.Struct("=I")
_CREDENTIALS = struct.Struct("=3i")  # process, user, group
_LONGEST = 4096
_HANDSHAKE_S = 10.0
_LONGEST_NAP_S = 3600.0
# Two ranks in step answer one another within some tens of microseconds; sleeping and waking takes as long.
_SPIN_S = 30e-6


class Post(NamedTuple):
    """A rank's n-th round, as it travels."""

    op: int
    dtype: int
    flags: int
    sizes: int  # a digest of all ranks' sizes
    total: int  # bytes, over all ranks
    number: int
    read: int  # the sender has read all rounds before this one
    start: int  # where in the sender's segment the bytes are

    @property
    def question(self) -> tuple[int, ...]:
        """The fields that must be the same on all ranks."""
        return self[:5]


class Neighbour:
    """Another rank: its socket, its segment, and its messages so far."""

    def __init__(self, rank: int, world_rank: int, link: socket.socket, pid: int, segment: Segment) -> None:
        self.rank = rank
        self.link = link
        self.segment = segment
        self.posts: deque[Post] = deque()
        self.read = 0
        self.fate = ""
        """Why nothing more will come from the rank; "" while it lives."""
        self.gave_up = ""
        """Why the rank gave up, in its own words."""
        self.ended_well = False
        """The rank left without an error."""
        self.name = f"rank {world_rank} (process {pid})" if pid else f"rank {world_rank}"
        self.process: int | None = None
        """A descriptor to poll for the end of the process, if the kernel has such descriptors."""
        if pid and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.process = os.pidfd_open(pid)

    def close(self) -> None:
        self.link.close()
        self.segment.close()
        if self.process is not None:
            os.close(self.process)
            self.process = None


class Neighbours:
    """All neighbours of a rank. Not safe for two threads at once; the transport has a lock."""

    def __init__(self, neighbours: Sequence[Neighbour], timeout_s: float) -> None:
        self.all = list(neighbours)
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._whose: dict[int, Neighbour] = {}
        for neighbour in self.all:
            for fd in (neighbour.link.fileno(), neighbour.process):
                if fd is not None:
                    self._poll.register(fd, select.POLLIN)
                    self._whose[fd] = neighbour

    def post(self, post: Post) -> None:
        self._tell_all(_MESSAGE.pack(_POST, *post))

    def confirm(self, read: int) -> None:
        self._tell_all(_MESSAGE.pack(_READ, 0, 0, 0, 0, 0, 0, read, 0))

    def abort(self, why: str) -> None:
        # Without a wait for room: a rank that has failed must end, also where another one reads no messages.
        self._tell_all(bytes([_ABORT]) + why.encode()[: _LONGEST - 1], must_arrive=False)

    def close(self, politely: bool) -> None:
        """Close the sockets. `politely` tells the others before, which a forked child must not do."""
        if politely:
            self._tell_all(bytes([_LEAVE, ends_well()]), must_arrive=False)
            for neighbour in self.all:
                # A forked child has the socket too, and would keep it open.
                with contextlib.suppress(OSError):
                    neighbour.link.shutdown(socket.SHUT_RDWR)
        for neighbour in self.all:
            neighbour.close()

    def _tell_all(self, message: bytes, must_arrive: bool = True) -> None:
        for neighbour in self.all:
            while not neighbour.fate:
                try:
                    neighbour.link.send(message, socket.MSG_NOSIGNAL)
                except BlockingIOError:  # the socket is full
                    if must_arrive:
                        self._wait_for_room(neighbour)
                        continue
                except OSError:
                    break  # the neighbour has ended; its last messages are still to be read
                break

    def _wait_for_room(self, neighbour: Neighbour) -> None:
        """Read incoming messages until `neighbour` has read enough to take more."""
        deadline = time.monotonic() + self._timeout_s
        room = select.poll()
        room.register(neighbour.link, select.POLLOUT)
        while not neighbour.fate and not room.poll(1):
            self.listen(0)
            if time.monotonic() > deadline:
                raise CommError(self._late([neighbour], "to read its messages"))

    def wait(self, whom: Sequence[Neighbour], arrived: Callable[[Neighbour], bool], what: object) -> None:
        """Sleep until something `arrived` from one of `whom`.

        Raises:
            CommError: one of `whom` has ended, or any rank gave up, or nothing came in time.
        """
        if self._arrives_soon(whom, arrived):
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            # Asked first: a message that has arrived counts, though its sender has ended since.
            if any(map(arrived, whom)):
                return
            for neighbour in whom:
                if neighbour.fate and not neighbour.gave_up:
                    if neighbour.ended_well:
                        raise CommError(f"{neighbour.name} {ENDED}; its part of the {what} is missing")
                    raise CommError(
                        f"{neighbour.name} has {neighbour.fate} before its part of the {what} arrived; look for the "
                        "first error in its log, and restart all ranks from the last checkpoint"
                    )
            for neighbour in self.all:
                if neighbour.gave_up:
                    raise CommError(f"{neighbour.name} gave up: {neighbour.gave_up}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommError(self._late(whom, f"in the {what}"))
            self.listen(left)

    def _arrives_soon(self, whom: Sequence[Neighbour], arrived: Callable[[Neighbour], bool]) -> bool:
        until = time.perf_counter() + _SPIN_S
        while True:
            for neighbour in whom:
                while not neighbour.fate and self._hear(neighbour):
                    if arrived(neighbour):
                        return True
            if time.perf_counter() > until:
                return False

    def _late(self, whom: Sequence[Neighbour], what: str) -> str:
        names = " and ".join(neighbour.name for neighbour in whom)
        return (
            f"waited {self._timeout_s:g} s for {names} {what}; it is stuck, or stopped, or asks for nothing more. See "
            "where it is (py-spy dump), or give init_process_group a longer timeout"
        )

    def listen(self, patience_s: float) -> None:
        """Take in the messages that have arrived. Without any, wait `patience_s` for one."""
        # `poll` takes milliseconds as a C int. Rounded up, for 0 ms would not sleep, and the caller would spin; and
        # cut, because the timeout of a group may be longer than the int.
        for fd, _ in self._poll.poll(math.ceil(min(patience_s, _LONGEST_NAP_S) * 1000)):
            neighbour = self._whose.get(fd)
            if neighbour is None:
                continue  # the neighbour ended on its other descriptor, in this same poll
            while self._hear(neighbour):
                pass
            if fd == neighbour.process and not neighbour.fate:
                self._ended(neighbour, "died")

    def _hear(self, neighbour: Neighbour) -> bool:
        """Take in one message. Returns whether there may be more."""
        try:
            message = neighbour.link.recv(_LONGEST)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # the neighbour ended with messages unread; its own last messages come next
        if not message:
            self._ended(neighbour, "died")
            return False
        kind = message[0]
        if kind == _POST:
            post = Post._make(_MESSAGE.unpack(message)[1:])
            neighbour.posts.append(post)
            neighbour.read = post.read
        elif kind == _READ:
            neighbour.read = Post._make(_MESSAGE.unpack(message)[1:]).read
        elif kind == _LEAVE:
            neighbour.ended_well = bool(message[1])
            self._ended(neighbour, "left (its process has ended, or destroyed its process group)")
        else:
            neighbour.gave_up = message[1:].decode(errors="replace")
            self._ended(neighbour, "given up")
        return not neighbour.fate

    def _ended(self, neighbour: Neighbour, fate: str) -> None:
        if not neighbour.fate:
            neighbour.fate = fate
            for fd in [fd for fd, whose in self._whose.items() if whose is neighbour]:
                self._poll.unregister(fd)
                del self._whose[fd]


def meet(group: dist.ProcessGroup, own: Segment | None, terms: tuple[object, ...]) -> list[Neighbour] | None:
    """Returns this rank's neighbours if all ranks of `group` can share memory; else None, on all ranks.

    All ranks of the group must call this, with the same `terms`. `own` is None on a rank without a segment.
    """
    rendezvous = _Rendezvous(group, own)
    try:
        cards = rendezvous.exchanged((*terms, *_place(), rendezvous.open()))
        addresses = [card[-1] for card in cards]
        is_one_place = len({card[:-1] for card in cards}) == 1 and None not in addresses
        steps = (lambda: rendezvous.call(addresses), rendezvous.answer, rendezvous.hear_answers)
        # The ranks agree after every step, so that none waits for a socket that will not come. `all` stops at the first
        # step that failed on some rank, which is the same one on all ranks.
        if is_one_place and all(rendezvous.succeeds(step) for step in steps):
            return rendezvous.neighbours()
        return None
    finally:
        rendezvous.close()


def _place() -> tuple[object, ...]:
    """Returns what two processes must share to reach one another: machine, network namespace, user, torch."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(), network_namespace() or secrets.token_hex(16), os.getuid(), torch.__version__
    except OSError:
        return (secrets.token_hex(16),)  # no other rank has the same


class _Rendezvous:
    """Ranks call those below them and answer those above, and hand over their segments."""

    def __init__(self, group: dist.ProcessGroup, own: Segment | None) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._own = own
        self._door: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}
        self._segments: dict[int, Segment] = {}

    def exchanged(self, mine: object) -> list[Any]:
        return all_gather_objects(mine, "the meeting of ranks that may share memory", self._group)

    def succeeds(self, step: Callable[[], None]) -> bool:
        """Returns whether `step` succeeds on all ranks."""
        try:
            step()
            is_done = True
        except (OSError, ValueError, struct.error):
            is_done = False
        return all(self.exchanged(is_done))

    def open(self) -> str | None:
        """Listen at a secret abstract address. Returns it; None on a system without abstract addresses."""
        if self._own is None:
            return None
        address = f"\0sherd-{secrets.token_hex(16)}"
        try:
            self._door = self._socket()
            self._door.bind(address)
            self._door.listen(self._size)
        except (OSError, AttributeError):
            return None
        return address

    @staticmethod
    def _socket() -> socket.socket:
        # Unlike a stream, SEQPACKET keeps messages apart. A program that this process starts does not inherit it.
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_HANDSHAKE_S)
        return link

    def call(self, addresses: Sequence[str]) -> None:
        """Connect to every rank below, all of which listen, and hand over this rank's segment."""
        for rank in range(self._rank):
            self._links[rank] = self._socket()
            self._links[rank].connect(addresses[rank])
            self._hand_over(self._links[rank])

    def answer(self) -> None:
        """Accept every rank above, all of which have connected, and hand over this rank's segment."""
        assert self._door is not None, "opened before"
        for _ in range(self._rank + 1, self._size):
            link, _ = self._door.accept()
            link.settimeout(_HANDSHAKE_S)
            rank, segment = self._taken_over(link)
            self._links[rank], self._segments[rank] = link, segment
            self._hand_over(link)

    def hear_answers(self) -> None:
        for rank in range(self._rank):
            answered, self._segments[rank] = self._taken_over(self._links[rank])
            if answered != rank:
                raise ValueError("another rank answered than was called")

    def _hand_over(self, link: socket.socket) -> None:
        assert self._own is not None, "else the door had stayed closed"
        socket.send_fds(link, [_HELLO.pack(self._rank)], [self._own.fd])

    def _taken_over(self, link: socket.socket) -> tuple[int, Segment]:
        message, fds, _, _ = socket.recv_fds(link, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            # An abstract address has no permissions, so a process of another user may have called.
            if len(fds) != 1 or _credentials(link)[1] != os.getuid():
                raise ValueError("not one of us")
            return _HELLO.unpack(message)[0], Segment(fds[0])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def neighbours(self) -> list[Neighbour]:
        """Returns the neighbours, by rank. They own the sockets and segments from now on."""
        neighbours = []
        for rank, link in sorted(self._links.items()):
            link.setblocking(False)
            world_rank = dist.get_global_rank(self._group, rank)
            neighbours.append(Neighbour(rank, world_rank, link, _credentials(link)[0], self._segments[rank]))
        self._links, self._segments = {}, {}
        return neighbours

    def close(self) -> None:
        for opened in (self._door, *self._links.values(), *self._segments.values()):
            if opened is not None:
                opened.close()


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Returns the process, user and group at the other end, as the kernel knows them."""
    pid, user, group = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user, group
