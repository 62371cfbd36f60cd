"""A user's own collectives (`sherd.policy.AllGather`, `ReduceScatter`) as a transport, and three ready-made ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sherd._torch import all_gather_single, backend_of, reduce_scatter_single, symmetric_memory
from sherd.comm.transport import Pending, Transport
from sherd.errors import PolicyError
from sherd.policy import AllGather, Comm, ReduceScatter


class _GroupMemory(Comm):
    """Buffers from the process group's own allocator, which may be registered with the network (NCCL)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        backend = backend_of(group, device)
        self._backend = backend if backend.supports_tensor_alloc(device) else None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory from the group, or from the usual allocator where the group has none (gloo)."""
        if self._backend is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)


class _SymmetricMemory(Comm):
    """Buffers that every rank maps, for collectives that copy without a kernel."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        if backend != "NCCL":
            raise PolicyError(f"set_symm_mem_for_comm(backend={backend!r}): only 'NCCL' is known")
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns symmetric memory. Raises `PolicyError` on a device that has none."""
        symmetric = symmetric_memory()
        # NCCL, the one backend to be named here, knows no other device.
        if device.type != "cuda":
            raise PolicyError(f"symmetric memory needs a CUDA device, the mesh is on {device}")
        buffer: torch.Tensor = symmetric.empty(*size, dtype=dtype, device=device)
        # Collective, so all ranks must allocate in the same order.
        symmetric.rendezvous(buffer, self._group)
        return buffer


class _SingleAllGather(AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather by one call into one buffer. Copies when the group is one rank, or None."""
        if group is None or group.size() == 1:
            output_tensor.copy_(input_tensor)
            return None
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _SingleReduceScatter(ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce by one call from one buffer. Copies when the group is one rank, or None."""
        if group is None or group.size() == 1:
            output_tensor.copy_(input_tensor)
            return None
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class GroupMemoryAllGather(_GroupMemory, _SingleAllGather):
    """torch's all-gather on memory of the process group."""


class GroupMemoryReduceScatter(_GroupMemory, _SingleReduceScatter):
    """torch's reduce-scatter on memory of the process group."""


class SymmetricAllGather(_SymmetricMemory, _SingleAllGather):
    """torch's all-gather on symmetric memory."""


class UsersCollectives(Transport):
    """A user's all-gather or reduce-scatter in the place of a transport's."""

    brings_memory = True

    def __init__(self, collective: AllGather | ReduceScatter, group: dist.ProcessGroup | None) -> None:
        self._collective = collective
        self._group: Any = group  # None, for a mesh of one rank, is handed on as it is

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory that the user's collective allocates."""
        return self._collective.allocate((numel,), dtype=dtype, device=device)

    def all_gather(
        self, rows: torch.Tensor, shard_buffer: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        assert isinstance(self._collective, AllGather), "weights are gathered by an all-gather"
        return self._collective(rows, shard_buffer, self._group, async_op)

    def reduce_scatter(
        self, shard_buffer: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], async_op: bool
    ) -> Pending | None:
        assert isinstance(self._collective, ReduceScatter), "gradients are reduced by a reduce-scatter"
        return self._collective(shard_buffer, rows, self._group, dist.ReduceOp.SUM, async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Pending | None:
        """Raises: a user's collectives gather and scatter only."""
        raise NotImplementedError("replicas are summed by the mesh's own transport")
