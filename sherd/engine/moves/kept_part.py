"""The part of a group's gathered buffers that a rank keeps after forward, for a smaller mesh to gather in backward."""

from __future__ import annotations

from collections.abc import Sequence

from sherd.comm.buffers import Buffer
from sherd.comm.mesh import DataMesh


class KeptPart:
    """This rank's part of each of `buffers`, copied, for a mesh of `size` ranks (`reshard_after_forward=size`).

    `transport` is that of the smaller mesh. All parts of a buffer are equally long. Collective at first: the smaller
    mesh needs a process group.
    """

    def __init__(self, buffers: Sequence[Buffer], mesh: DataMesh, size: int) -> None:
        numels = [buffer.tensor.numel() // size for buffer in buffers]
        at = mesh.shard_rank % size
        self.tensors = tuple(
            buffer.tensor[at * numel : (at + 1) * numel].clone() for buffer, numel in zip(buffers, numels, strict=True)
        )
        self.size = size
        self.transport = mesh.transport_of(mesh.smaller_group(size))
