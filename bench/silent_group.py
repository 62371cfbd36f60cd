"""A group whose collectives do nothing at all, so that what a step costs is the engine's own work.

Torch's fake group copies the shard into every rank's part of a gather's output: at 4,096 ranks that is 4,096
copies a gather, which would drown what is to be measured.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "silent"
COLLECTIVES = """
    allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced all_gather_single
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single
    allreduce allreduce_coalesced broadcast alltoall alltoall_base all_to_all_single barrier
"""


def _nothing(*args: Any, **kwargs: Any) -> dist.Work:
    done: Future[None] = Future()
    done.set_result(None)
    return _create_work_from_future(done)


class SilentGroup(dist.ProcessGroup):
    """Outputs stay as they were, and every work is done before it is waited for."""

    # The group in C++ keeps its name in its backends, of which this one has none.
    group_name = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def getBackendName(self) -> str:
        return NAME


for _name in COLLECTIVES.split():
    setattr(SilentGroup, _name, _nothing)


def register(device: str) -> None:
    """Make `backend="silent"` known to `torch.distributed`, for tensors on `device` and on the CPU; call it once in a
    process."""
    devices = sorted({"cpu", device})
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: SilentGroup(rank, size), devices=devices)
