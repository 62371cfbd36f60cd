"""The choice of a transport, made once per process group: by policy, backend and what its ranks can share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.distributed as dist

from sherd._torch import coalesces
from sherd.comm.groups import forget_destroyed, require_alive
from sherd.comm.transport import CoalescedCalls, LargeCoalesced, OneRank, PartByPart, SingleCalls, Transport
from sherd.errors import MeshError
from sherd.policy import CommPolicy

MOST_NEIGHBOURS = 12
"""The most ranks that share memory under "auto": a rank holds three descriptors for each other rank."""

_ONE_RANK = OneRank()
_known: dict[dist.ProcessGroup, dict[str, Transport]] = {}
"""By group and policy, as long as the group is registered with torch.

Not as long as it is used: ranks collect garbage at different moments, and all ranks must make a transport together.
"""

_replaced: ContextVar[Callable[[dist.ProcessGroup, str], Transport] | None] = ContextVar("transports", default=None)


@contextmanager
def use_transports(make: Callable[[dist.ProcessGroup, str], Transport]) -> Iterator[None]:
    """A context in which groups take `make(group, wanted)` for a policy's `wanted`, for ranks that do not exist."""
    token = _replaced.set(make)
    try:
        yield
    finally:
        _replaced.reset(token)


def transport_of(group: dist.ProcessGroup | None, device: torch.device, policy: CommPolicy) -> Transport:
    """Returns the transport of `group`. The first call makes it, and all ranks of the group must take part in it.

    Raises:
        MeshError: `policy` asks for a transport that cannot serve these ranks, or `group` was destroyed.
    """
    if group is None or group.size() == 1:
        return _ONE_RANK
    known = _known.get(group)
    if known is None:
        forget_destroyed(_known)
        known = _known[group] = {}
    if policy.transport not in known:
        require_alive(group, "a sharded model")
        known[policy.transport] = _made(group, device, policy.transport)
    return known[policy.transport]


def check_transport(group: dist.ProcessGroup | None, device: torch.device, policy: CommPolicy) -> None:
    """Raise MeshError if the backend of `group` cannot have the transport of `policy`. Without communication."""
    if group is None or group.size() == 1 or policy.transport in ("auto", "torch", "coalesced") or _replaced.get():
        return
    if not _is_on_gloo(group, device):
        raise MeshError(
            f"CommPolicy(transport={policy.transport!r}) serves CPU ranks on gloo; this group's backends are "
            f"{dist.get_backend_config(group)!r}, its device {device}; leave the transport to 'auto'"
        )


def _is_on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    # get_backend() would not do: it says "undefined" for a group that was made without naming its backends.
    return device.type == "cpu" and _has_gloo(group, device)


def _has_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def _made(group: dist.ProcessGroup, device: torch.device, wanted: str) -> Transport:
    replaced = _replaced.get()
    if replaced is not None:
        return replaced(group, wanted)
    on_gloo = _is_on_gloo(group, device)
    if not on_gloo and _has_gloo(group, device):
        # Coalesced calls are left out, too: gloo's end the process on CUDA tensors (torch 2.11).
        return PartByPart(group)
    if wanted != "auto":
        names = [wanted]
    elif not on_gloo:
        return _torch(group, on_gloo, LargeCoalesced if coalesces(group, device) else SingleCalls)
    else:
        names = ["shared_memory", "gloo"] if group.size() <= MOST_NEIGHBOURS else ["gloo"]
    for name in names:
        transport = MAKERS[name](group, on_gloo)
        if transport is not None:
            return transport
    raise MeshError(
        f"CommPolicy(transport='shared_memory'): ranks {dist.get_process_group_ranks(group)} cannot map one "
        "another's memory; they must be on one host, in one network namespace and of one user. Use 'auto' or 'gloo'"
    )


# The host's transports are plug-ins: nothing else in `comm` knows them, and each is loaded when a group first gets it.


def _gloo(group: dist.ProcessGroup, on_gloo: bool) -> Transport:
    from sherd.comm.host.gloo import Gloo

    return Gloo(group)


def _shared_memory(group: dist.ProcessGroup, on_gloo: bool) -> Transport | None:
    from sherd.comm.host.shared_memory import SharedMemory

    return SharedMemory.meet(group)


def _torch(group: dist.ProcessGroup, on_gloo: bool, calls: type[SingleCalls] = SingleCalls) -> Transport:
    # gloo's list forms refuse parts of unequal length.
    return calls(group, for_uneven=_gloo(group, on_gloo) if on_gloo else None)


MAKERS: dict[str, Callable[[dist.ProcessGroup, bool], Transport | None]] = {
    "torch": _torch,
    "coalesced": partial(_torch, calls=CoalescedCalls),
    "gloo": _gloo,
    "shared_memory": _shared_memory,
}
"""By name in a policy: makes the transport of a group, which may be on gloo; None if its ranks cannot have it."""
