"""The sockets of this process, and what has come through them."""

import contextlib
import os
import socket
import struct

BYTES_RECEIVED = 128  # where Linux has it in tcp_info


def sockets() -> set[str]:
    """What the system calls each socket of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if each.startswith("socket:")}


def received() -> dict[str, tuple[int, int]]:
    """By TCP socket: the port of the other side, and the bytes that have come from there."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
            port = each.getpeername()[1]
            name = os.readlink(f"/proc/self/fd/{number}")
            found[name] = port, struct.unpack_from("=Q", info, BYTES_RECEIVED)[0]
    return found
