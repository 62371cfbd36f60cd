"""The part of a group's unsharded buffer that a rank keeps after forward, for a smaller mesh to gather in backward."""

from __future__ import annotations

from sherd.comm.buffers import Buffer
from sherd.comm.mesh import DataMesh
from sherd.comm.transport import Pending


class KeptPart:
    """This rank's part of `buffer`, copied, for a mesh of `size` ranks (`reshard_after_forward=size`). All parts are
    equally long. Collective at first: the smaller mesh needs a process group."""

    def __init__(self, buffer: Buffer, mesh: DataMesh, size: int) -> None:
        numel = buffer.tensor.numel() // size
        start = mesh.shard_rank % size * numel
        self.tensor = buffer.tensor[start : start + numel].clone()
        self._transport = mesh.transport_of(mesh.smaller_group(size))

    def gather(self, buffer: Buffer, async_op: bool) -> Pending | None:
        """Fill `buffer` with the parts of all ranks of the smaller mesh."""
        buffer.allocate()
        sizes = (self.tensor.numel(),) * (buffer.tensor.numel() // self.tensor.numel())
        return self._transport.all_gather(buffer.tensor, self.tensor, sizes, async_op)
