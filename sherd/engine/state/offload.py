"""The place where shards rest between two uses: the mesh's device, or host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.policy import CPUOffloadPolicy, OffloadPolicy

FETCHED_NUMEL = 1 << 18
"""Elements that are brought to the device at a time, where they are cast there."""


@dataclass(frozen=True, slots=True)
class RestingPlace:
    """`device`: where shard buffers and shard gradients live; `pinned`: in page-locked host memory; `is_elsewhere`: not
    in the memory of the device that computes."""

    device: torch.device
    pinned: bool = False
    is_elsewhere: bool = False

    @classmethod
    def under(cls, policy: OffloadPolicy, mesh_device: torch.device) -> RestingPlace:
        """Returns the place that `policy` asks for. On a CPU mesh shards are in host memory anyway."""
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(mesh_device)
        is_elsewhere = mesh_device.type != "cpu"
        return cls(torch.device("cpu"), policy.pin_memory and is_elsewhere, is_elsewhere)

    def empty(self, numel: int, dtype: torch.dtype, now_on: torch.device) -> torch.Tensor:
        """Returns a zeroed buffer here, or a meta one while the parameters have no data (`now_on` is meta)."""
        if now_on.type == "meta":
            return torch.empty(numel, dtype=dtype, device="meta")
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def copy_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of `shard` here; of one without data, one without data."""
        if shard.is_meta or shard.device == self.device:
            return shard.clone(memory_format=torch.contiguous_format)
        return shard.to(self.device, memory_format=torch.contiguous_format)

    def fetch(self, shard_buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns `shard_buffer` on the compute device. A copy is ordered on the current stream."""
        return shard_buffer if shard_buffer.device == device else shard_buffer.to(device, non_blocking=True)

    def store(self, reduced: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a reduced gradient here. The copy is ordered on the current stream; where memory is pinned
        the host does not wait for it."""
        stored = torch.empty(reduced.shape, dtype=reduced.dtype, device=self.device, pin_memory=self.pinned)
        return stored.copy_(reduced, non_blocking=True)


def fetch_into(target: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy `shard`, 1-D, in any dtype and on any device, into `target`. The copy is ordered on the current stream.

    What is cast on its way from host memory is cast on the device, a part at a time: torch's own copy would cast it on
    the host, which would wait for that.
    """
    if shard.device == target.device or shard.dtype == target.dtype:
        target.copy_(shard, non_blocking=True)
        return
    for piece, place in zip(shard.split(FETCHED_NUMEL), target.split(FETCHED_NUMEL), strict=True):
        place.copy_(piece.to(target.device, non_blocking=True))
