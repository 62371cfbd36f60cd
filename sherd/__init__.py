"""Fully sharded data parallel training for PyTorch. The names mirror `torch.distributed.fsdp`, so a changed import is a
port."""

from sherd.api.fully_shard import fully_shard
from sherd.api.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from sherd.errors import SherdError
from sherd.policy import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    ReduceScatter,
)

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PrefetchPolicy",
    "ReduceScatter",
    "SherdError",
    "UnshardHandle",
    "__version__",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
