"""How do all ranks get a whole tensor from its runs, and one rank its run of a whole tensor?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sherd._torch import all_gather_single
from sherd.layout.runs import Runs
from sherd.tensor.placement import Layout

PADDING_LIMIT = 2
"""An all-gather pads every piece to the largest; up to this many times the tensor, one call is worth it."""


def gather(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The whole tensor, in memory of its own, on every rank of the shard axis. All of them must call it."""
    cut = layout.cut
    if layout.mesh.size(layout.axis) == 1:
        return local.detach().reshape(cut.shape).clone()
    whole = torch.empty(cut.shape, dtype=local.dtype, device=local.device)
    if cut.numel:
        # As bytes, which every backend can move.
        _gather_bytes(_bytes(local), _bytes(whole), whole.element_size(), layout)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _gather_bytes(local: torch.Tensor, whole: torch.Tensor, item: int, layout: Layout) -> None:
    cut, group = layout.cut, layout.group
    pieces = [cut.piece(rank) for rank in range(cut.num_ranks)]
    largest = max(piece.numel for piece in pieces)
    if largest * cut.num_ranks > PADDING_LIMIT * cut.numel:
        _broadcast_pieces(local, whole, item, layout)
    elif largest * cut.num_ranks == cut.numel:
        all_gather_single(whole, local, group=group)
    else:
        padded = local.new_zeros(largest * item)
        padded[: local.numel()] = local
        gathered = local.new_empty(largest * item * cut.num_ranks)
        all_gather_single(gathered, padded, group=group)
        for rank, piece in enumerate(pieces):
            start = rank * largest * item
            whole[piece.start * item : piece.stop * item] = gathered[start : start + piece.numel * item]


def _broadcast_pieces(local: torch.Tensor, whole: torch.Tensor, item: int, layout: Layout) -> None:
    """Each holder sends its piece into place."""
    works = []
    for rank in layout.cut.holders:
        piece = layout.cut.piece(rank)
        if not piece.numel:
            continue
        place = whole[piece.start * item : piece.stop * item]
        if rank == layout.rank:
            place.copy_(local)
        works.append(dist.broadcast(place, group=layout.group, group_src=rank, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def run_of(whole: torch.Tensor, cut: Runs, rank: int) -> torch.Tensor:
    """What `rank` holds of a whole tensor, in the shape it has there: a view, if the whole tensor is contiguous."""
    piece = cut.piece(rank)
    return whole.reshape(-1)[piece.start : piece.stop].view(cut.local_shape(rank))


def part_given(
    value: torch.Tensor, shape: tuple[int, ...], local: torch.Tensor, piece: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """What a user's `value` for a tensor of `shape` gives to one rank, whose part is `local`: the rank's `piece` of a
    whole tensor, or the part itself. None if it is neither."""
    value = value.detach()
    if tuple(value.shape) == shape:
        return piece(value)
    return value.view_as(local) if value.dim() in (1, local.dim()) and value.numel() == local.numel() else None


def piece_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's run of a whole tensor."""
    return run_of(whole, layout.cut, layout.rank)
