"""Transports of ranks that do not exist: in what they bring and take they are those that real ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sherd.comm.host.gloo import Gloo
from sherd.comm.host.sums import sum_dtype
from sherd.comm.transport import SingleCalls, Transport

__all__ = ["between_hosts", "on_one_host"]


class _TorchOnHost(SingleCalls):
    """torch's calls over gloo, which copies what it reduces."""

    def scratch_bytes(self, sizes: Sequence[int], rank: int, itemsize: int) -> int:
        return sum(sizes) * itemsize


class _Shared(SingleCalls):
    """CPU ranks of one host, which read one another's memory."""

    shares_memory = True

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype)


def on_one_host(group: dist.ProcessGroup, wanted: str) -> Transport:
    """Returns the transport that CPU ranks of one host have where a policy says `wanted`."""
    return _Shared(group) if wanted in ("auto", "shared_memory") else between_hosts(group, wanted)


def between_hosts(group: dist.ProcessGroup, wanted: str) -> Transport:
    """Returns the transport that CPU ranks of several hosts have where a policy says `wanted`."""
    return Gloo(group) if wanted in ("auto", "gloo") else _TorchOnHost(group)
