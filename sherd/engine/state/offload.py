"""The place where shards rest between two uses: the mesh's device, or host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sherd.policy import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True, slots=True)
class RestingPlace:
    """`device`: where shard buffers and shard gradients live; `pinned`: in page-locked host memory."""

    device: torch.device
    pinned: bool = False

    @classmethod
    def under(cls, policy: OffloadPolicy, mesh_device: torch.device) -> RestingPlace:
        """Returns the place that `policy` asks for. On a CPU mesh shards are in host memory anyway."""
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(mesh_device)
        return cls(torch.device("cpu"), pinned=policy.pin_memory and mesh_device.type != "cpu")

    def empty(self, numel: int, dtype: torch.dtype, now_on: torch.device) -> torch.Tensor:
        """Returns a zeroed buffer here, or a meta one while the parameters have no data (`now_on` is meta)."""
        if now_on.type == "meta":
            return torch.empty(numel, dtype=dtype, device="meta")
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def fetch(self, shard_buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns `shard_buffer` on the compute device. A copy is ordered on the current stream."""
        return shard_buffer if shard_buffer.device == device else shard_buffer.to(device, non_blocking=True)

    def store(self, reduced: torch.Tensor) -> torch.Tensor:
        """Returns a reduced gradient here.

        It waits for the copy to host memory: the optimizer that reads it runs on the host, which no stream orders.
        """
        return reduced if reduced.device == self.device else reduced.to(self.device)
