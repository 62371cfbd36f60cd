"""Fully sharded data parallel training for PyTorch. The names mirror `torch.distributed.fsdp`, so a changed import is a
port."""

from sherd.api.fully_shard import fully_shard
from sherd.api.memory import memory_report, track_memory
from sherd.api.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from sherd.errors import SherdError
from sherd.layout.runs import Blocks, Flat, Whole
from sherd.optim import flatten_optimizer
from sherd.policy import (
    AllGather,
    Comm,
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    ReduceScatter,
)
from sherd.tensor.ragged import RaggedDTensor

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "Blocks",
    "CPUOffloadPolicy",
    "Comm",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "Flat",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PrefetchPolicy",
    "RaggedDTensor",
    "ReduceScatter",
    "SherdError",
    "UnshardHandle",
    "Whole",
    "__version__",
    "flatten_optimizer",
    "fully_shard",
    "memory_report",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "track_memory",
]
