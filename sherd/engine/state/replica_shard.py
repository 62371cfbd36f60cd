"""A shard that is divided among replicas: each replica steps its own piece, and fetches the others before a gather.

    replica 0   optimizer steps | a a |           fetches      | a a | b b |    and sends all of it
    replica 1   optimizer steps       | b b |                  | a a | b b |    along the shard axis

Pieces are fetched once after they were written, not for each gather: a step of several micro-batches pays for it once.
If the copy of the shard has the dtype and the device of the pieces, the rank's own piece is a part of the copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sherd.comm.mesh import DataMesh
from sherd.comm.transport import Sizes
from sherd.engine.state.offload import fetch_into
from sherd.layout.extent import Extent


class FetchedShard:
    """The full shard, 1-D, of which every replica owns a piece. `sizes` are the sizes of the pieces. There is one copy
    for each dtype that was asked for."""

    def __init__(self, sizes: Sizes, mesh: DataMesh) -> None:
        self.sizes = sizes
        self._mesh = mesh
        self._own = Extent(sum(sizes[: mesh.replica]), sizes[mesh.replica])
        self._copies: dict[torch.dtype, torch.Tensor] = {}
        self._versions: dict[torch.dtype, int] = {}

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(self.sizes)

    def holding(self, shard: torch.Tensor) -> torch.Tensor:
        """Keep `shard`, `[numel]`, as a copy. Returns this rank's piece of it."""
        self._copies[shard.dtype] = shard
        return self.own_part(shard)

    def own_part(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of `shard`, a view."""
        return shard[self._own.start : self._own.stop]

    def around(self, piece: torch.Tensor, dtype: torch.dtype, version: int) -> torch.Tensor:
        """Returns the shard in `dtype`, given this rank's piece of it. Collective over the replicate axis if `version`
        is new."""
        shard = self._copies.get(dtype)
        if shard is None:
            shard = self._copies[dtype] = torch.empty(self.numel, dtype=dtype, device=self._mesh.device)
        if self._versions.get(dtype) != version:
            own = self.own_part(shard)
            if own.data_ptr() != piece.data_ptr():
                fetch_into(own, piece)
            self._mesh.fetch_transport.all_gather(shard, own, self.sizes, False)
            self._versions[dtype] = version
        return shard

    def has_piece(self, piece: torch.Tensor) -> bool:
        """Returns whether `piece`, this rank's own, is a part of a copy."""
        shard = self._copies.get(piece.dtype)
        return shard is not None and self.own_part(shard).data_ptr() == piece.data_ptr()

    def held(self) -> Iterator[torch.Tensor]:
        """Yields the copies."""
        yield from self._copies.values()
