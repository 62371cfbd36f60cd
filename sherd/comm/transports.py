"""The choice of a transport, made once per process group: by policy, backend and what its ranks can share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from sherd.comm.groups import forget_destroyed, require_alive
from sherd.comm.transport import CoalescedCalls, OneRank, PartByPart, SingleCalls, Transport
from sherd.errors import MeshError
from sherd.policy import CommPolicy

MOST_NEIGHBOURS = 12
"""The most ranks that share memory unless a policy says so: a rank holds three descriptors for each of the others."""

_ONE_RANK = OneRank()
_known: dict[dist.ProcessGroup, dict[str, Transport]] = {}
"""Kept as long as the group is registered with torch, not as long as it is used: garbage is collected at different
moments on different ranks, and all ranks must make a transport together."""


_replaced: ContextVar[Callable[[dist.ProcessGroup, str], Transport] | None] = ContextVar("transports", default=None)


@contextmanager
def use_transports(make: Callable[[dist.ProcessGroup, str], Transport]) -> Iterator[None]:
    """Have groups that need a transport inside take `make(group, wanted)`, where a policy says `wanted`: so that ranks
    which do not exist have the transports of others."""
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
    """Check without communication that the backend of `group` can have the transport that `policy` asks for.

    Raises:
        MeshError: it cannot.
    """
    if group is None or group.size() == 1 or policy.transport in ("auto", "torch", "coalesced") or _replaced.get():
        return
    if not _is_on_gloo(group, device):
        raise MeshError(
            f"CommPolicy(transport={policy.transport!r}) serves CPU ranks on gloo; this group's backends are "
            f"{dist.get_backend_config(group)!r}, its device {device}; leave the transport to 'auto'"
        )


def _is_on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    # get_backend() would not do: it does not name the backends of a group that was made without naming any.
    return device.type == "cpu" and _has_gloo(group, device)


def _has_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def _made(group: dist.ProcessGroup, device: torch.device, wanted: str) -> Transport:
    # Loaded with the first transport of several ranks: one rank alone needs neither.
    from sherd.comm.host.gloo import Gloo
    from sherd.comm.host.shared_memory import SharedMemory

    replaced = _replaced.get()
    if replaced is not None:
        return replaced(group, wanted)
    on_gloo = _is_on_gloo(group, device)
    if not on_gloo and _has_gloo(group, device):
        # Coalesced calls are left out, too: gloo's end the process on CUDA tensors (torch 2.11).
        return PartByPart(group)
    if wanted in ("torch", "coalesced") or (wanted == "auto" and not on_gloo):
        # gloo's list forms refuse parts of unequal length.
        calls = CoalescedCalls if wanted == "coalesced" else SingleCalls
        return calls(group, for_uneven=Gloo(group) if on_gloo else None)
    is_wanted = wanted == "shared_memory" or (wanted == "auto" and group.size() <= MOST_NEIGHBOURS)
    shared = SharedMemory.meet(group) if is_wanted else None
    if shared is not None:
        return shared
    if wanted == "shared_memory":
        raise MeshError(
            f"CommPolicy(transport='shared_memory'): ranks {dist.get_process_group_ranks(group)} cannot map one "
            "another's memory; they must be on one host, in one network namespace and of one user. Use 'auto' or 'gloo'"
        )
    return Gloo(group)
