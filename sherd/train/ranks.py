"""The ranks of a run meet and agree."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist

from sherd.comm.accelerator import backend
from sherd.comm.agreement import on_all_ranks
from sherd.comm.failures import unfinished
from sherd.comm.objects import broadcast_object, do_without_numpy
from sherd.errors import CommError, SherdError
from sherd.train.config import InputError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # by which one rank may be later than another


@contextlib.contextmanager
def group() -> Iterator[None]:
    """The default process group. A crash leaves it as it is: waiting for other ranks could take forever.

    Raises:
        CommError: the ranks cannot reach one another, or, from inside, a collective could not be finished.
    """
    meet(TIMEOUT)
    try:
        yield
    except InputError:
        dist.destroy_process_group()  # all ranks are here: `together` saw to it
        raise
    except RuntimeError as error:
        if (named := lost_touch(error)) is None:
            raise
        raise named from error
    dist.destroy_process_group()


def meet(timeout: timedelta) -> None:
    """Make the default process group. Raises CommError: the ranks cannot reach one another."""
    take_the_way_to_the_others()
    do_without_numpy()
    try:
        dist.init_process_group(backend(), timeout=timeout)
    except RuntimeError as error:
        raise apart(error) from error


def together(action: Callable[[], T]) -> T:
    """Returns what `action` returns on this rank.

    Raises:
        InputError: on every rank alike, when any rank raised it.
    """
    return on_all_ranks(
        action, "the meeting of all ranks", lambda e: (InputError, str(e)) if isinstance(e, InputError) else None
    )


def on_rank_0(action: Callable[[], T]) -> T:
    """Returns what `action` returned on rank 0, the only one to do it. Raises as `together` does."""
    value = together(action) if dist.get_rank() == 0 else together(lambda: None)
    return broadcast_object(value, "the broadcast of what rank 0 has done")  # type: ignore[no-any-return]


# Several machines


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Asked for by name, loopback works where gloo's own search does not: on a laptop without a network."""

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
# What gloo and torch's store say when a collective cannot be finished; they have no exception of their own.
_SIGNS = ("gloo/", "pair closure", "TCPStore")


def take_the_way_to_the_others() -> None:
    """Have gloo use the interface that leads to rank 0's machine, where torchrun has started ranks on several.

    gloo itself takes the address of this machine's name, which on many is a loopback address, so that ranks of other
    machines are refused. What the user has set is left alone.
    """
    host = os.environ.get("MASTER_ADDR", "")
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and host and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_to(host)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_to(host: str) -> str | None:
    """The network interface on the way to `host`; None where that is loopback, or cannot be told (Linux, IPv4)."""
    if sys.platform != "linux":
        return None
    import fcntl  # not on every platform

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing, but decides from which address it would
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(answer[20:24]) == own and not own.startswith("127."):
                        return name
    except OSError:
        pass
    return None


def apart(error: RuntimeError) -> CommError:
    """`error`, from the making of the first process group, by its name."""
    way = os.environ.get("GLOO_SOCKET_IFNAME", "the one of this machine's name")
    return CommError(
        f"the ranks did not all meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}. "
        f"A rank has died or cannot be reached: look for the first error in the logs of all ranks; gloo's interface "
        f"here is {way}, GLOO_SOCKET_IFNAME names another"
    )


def lost_touch(error: RuntimeError) -> CommError | None:
    """`error` by its name, if it comes from a collective that could not be finished; None for any other.

    What `fully_shard` sends raises a CommError by itself. This is for what torch sends: norms, sums of losses.
    """
    is_of_torch = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)
    if isinstance(error, SherdError) or not is_of_torch:
        return None
    return unfinished("a collective of sherd train", range(dist.get_world_size()), error)
