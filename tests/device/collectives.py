"""Registers "simccl", the collectives of the simulated device, with `torch.distributed`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

from tests.device.native import native

NAME = "simccl"


def register() -> None:
    """Let process groups be made with the backend "sim:simccl"."""
    dist.Backend.register_backend(NAME, _backend_of_a_group, extended_api=True, devices=["sim"])


def _backend_of_a_group(options: _DistributedBackendOptions, _: object) -> Backend:
    timeout = options.timeout
    assert isinstance(timeout, timedelta), "torch gives no other"
    return native().Collectives(
        options.store,
        options.group_rank,
        options.group_size,
        timeout,
        str(options.group_id),
        list(options.global_ranks_in_group),
    )
