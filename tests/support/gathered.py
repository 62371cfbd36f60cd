"""Many sharded tensors whole at once.

`full_tensor` moves one at a time, which takes longer than the training whose parameters and gradients it shows. Here
their pieces travel together, as a checkpoint sees them: where each begins, and its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sherd.tensor.ragged import RaggedDTensor


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor: where it begins, its sizes, and its bytes, which pickle fast."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: np.ndarray

    def write_to(self, whole: Tensor) -> None:
        values = torch.from_numpy(self.data).view(whole.dtype).view(self.sizes)
        whole[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))] = values


def gathered(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Plain unsharded copies of `tensors`, on every rank of their meshes; all of these ranks must call it.

    A replicated mesh axis is left alone: two replicas that drifted apart both show themselves.
    """
    found = [None if tensor is None else _copy(tensor.detach()) for tensor in tensors]
    sharded = {at: tensor for at, tensor in enumerate(found) if isinstance(tensor, DTensor)}
    ways = {at: (tensor.device_mesh, _sharded_axes(tensor)) for at, tensor in sharded.items()}
    for way in dict.fromkeys(ways.values()):
        places = [at for at in sharded if ways[at] == way]
        for at, pieces in zip(places, _exchanged([_pieces(sharded[at]) for at in places], *way), strict=True):
            found[at] = _joined(pieces, sharded[at])
    return found


def _copy(tensor: Tensor) -> Tensor:
    """`tensor` itself if its pieces can be joined here; else an unsharded copy."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    known = isinstance(tensor, RaggedDTensor) or all(type(each) in (Shard, Replicate) for each in tensor.placements)
    return tensor if known else tensor.full_tensor().clone()


def _sharded_axes(tensor: DTensor) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _pieces(tensor: DTensor) -> list[Piece]:
    """What this rank holds."""
    pieces = []
    for chunk in tensor.__create_chunk_list__():
        values = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets)).detach().cpu()
        if values.numel():
            data = values.contiguous().view(-1).view(torch.uint8).numpy()
            pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), data))
    return pieces


def _exchanged(pieces: list[list[Piece]], mesh: DeviceMesh, axes: Sequence[int]) -> list[list[Piece]]:
    """Those of all ranks along `axes`, tensor by tensor."""
    for axis in axes:
        by_rank: list[list[list[Piece]]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(by_rank, pieces, group=mesh.get_group(axis))
        pieces = [[piece for pieces in of_all for piece in pieces] for of_all in zip(*by_rank, strict=True)]
    return pieces


def _joined(pieces: list[Piece], like: DTensor) -> Tensor:
    # What no rank holds is not a number, and equals nothing; among whole numbers it is the last one to be expected.
    is_whole_number = not (like.dtype.is_floating_point or like.dtype.is_complex)
    unknown = torch.iinfo(like.dtype).min if is_whole_number else torch.nan
    whole = torch.full(like.shape, unknown, dtype=like.dtype)
    for piece in pieces:
        piece.write_to(whole)
    return whole.to(like.device)
