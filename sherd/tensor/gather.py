"""How do all ranks get a whole tensor from its runs, and one rank its run of a whole tensor?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist

from sherd._torch import all_gather_single
from sherd.comm.failures import named
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs
from sherd.tensor.placement import Layout, Split

PADDING_LIMIT = 2
"""An all-gather pads every piece to the largest; up to this many times the tensor, one call is worth it."""


def gather(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The whole tensor, in memory of its own, on every rank that holds a piece. All of them must call it."""
    part = gather_part(local, layout)
    for split in reversed(layout.splits):
        part = _joined_on_dim(part, split, layout)
    return part


def gather_part(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What is cut into runs, in memory of its own: the whole tensor, or the part of it that axes with `Shard(dim)`
    leave to this rank. All ranks of the axes that the runs are on must call it.

    Axis by axis, the fastest first: then the pieces that are joined follow one another.

        mesh (outer 2, inner 2), runs 0 to 3:      outer: 0 1 | 2 3      then inner: 0 1 2 3
    """
    cut, mesh = layout.cut, layout.mesh
    line = local.detach().reshape(-1)
    num_joined = 1
    for axis in layout.axes:
        size = mesh.size(axis)
        if size == 1:
            continue
        at = layout.rank // num_joined % size
        first = layout.rank - layout.rank % (num_joined * size)
        starts = [cut.piece(first + index * num_joined).start for index in range(size)]
        starts.append(cut.piece(first + size * num_joined - 1).stop)
        numels = [stop - start for start, stop in pairwise(starts)]
        line = _joined(line, numels, at, mesh.get_group(axis))
        num_joined *= size
    return line.view(cut.shape) if num_joined > 1 else line.view(cut.shape).clone()


def _joined_on_dim(part: torch.Tensor, split: Split, layout: Layout) -> torch.Tensor:
    """The parts of all ranks of an axis with `Shard(dim)`, side by side."""
    dim = split.dim
    if len(split.extents) == 1:
        return part
    before, after = part.shape[:dim], part.shape[dim + 1 :]
    shapes = [(*before, extent.numel, *after) for extent in split.extents]
    numels = [prod(shape) for shape in shapes]
    line = _joined(part.reshape(-1), numels, split.rank, layout.mesh.get_group(split.axis))
    size = sum(extent.numel for extent in split.extents)
    if not dim:
        return line.view(size, *after)
    joined = line.new_empty((*before, size, *after))
    for piece, shape, extent in zip(line.split(numels), shapes, split.extents, strict=True):
        joined.narrow(dim, extent.start, extent.numel).copy_(piece.view(shape))
    return joined


def _joined(line: torch.Tensor, numels: Sequence[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The lines of all ranks of a group behind one another; rank i has `numels[i]` elements."""
    full = torch.empty(sum(numels), dtype=line.dtype, device=line.device)
    if full.numel():
        # As bytes, which every backend can move.
        sizes = [numel * full.element_size() for numel in numels]
        with named("the gather of a RaggedDTensor", group):
            _gather_bytes(_bytes(line), full.view(torch.uint8), sizes, rank, group)
    return full


def _bytes(line: torch.Tensor) -> torch.Tensor:
    # A tensor of one element is contiguous with any stride, but can only be seen as bytes with stride 1.
    return (line if line.stride(0) == 1 else line.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _gather_bytes(
    local: torch.Tensor, full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup
) -> None:
    largest = max(sizes)
    if largest * len(sizes) == full.numel():
        all_gather_single(full, local, group=group)
    elif largest * len(sizes) > PADDING_LIMIT * full.numel():
        _broadcast_pieces(local, full.split(list(sizes)), rank, group)
    else:
        padded = local.new_zeros(largest)
        padded[: local.numel()] = local
        gathered = local.new_empty(largest * len(sizes))
        all_gather_single(gathered, padded, group=group)
        start = 0
        for index, size in enumerate(sizes):
            full[start : start + size] = gathered[index * largest : index * largest + size]
            start += size


def _broadcast_pieces(local: torch.Tensor, places: Sequence[torch.Tensor], rank: int, group: dist.ProcessGroup) -> None:
    """Each holder sends its piece into place."""
    works = []
    for sender, place in enumerate(places):
        if not place.numel():
            continue
        if sender == rank:
            place.copy_(local)
        works.append(dist.broadcast(place, group=group, group_src=sender, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def run_of(full: torch.Tensor, cut: Runs, rank: int) -> torch.Tensor:
    """What `rank` holds of a whole tensor, in the shape it has there: a view, if the whole tensor is contiguous."""
    piece = cut.piece(rank)
    return full.reshape(-1)[piece.start : piece.stop].view(cut.local_shape(rank))


def part_given(
    value: torch.Tensor, shape: tuple[int, ...], local: torch.Tensor, piece: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """What a user's `value` for a tensor of `shape` gives to one rank, whose part is `local`: the rank's `piece` of a
    whole tensor, or the part itself. None if it is neither."""
    value = value.detach()
    if tuple(value.shape) == shape:
        return piece(value)
    return value.view_as(local) if value.dim() in (1, local.dim()) and value.numel() == local.numel() else None


def counted_here(local: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What of this rank's run a reduction counts here, each element on one rank: views, one after the other."""
    if layout.counted is None:
        return [local]
    line = local.reshape(-1)
    return [line[each.start : each.stop] for each in layout.counted]


def shard_of(tensor: torch.Tensor, cut: Cut | Runs, rank: int) -> torch.Tensor:
    """What `rank` holds of `tensor`, in the shape it has there: a view if `tensor` is contiguous or cut on a dim."""
    if isinstance(cut, Runs):
        return run_of(tensor, cut, rank)
    if cut.dim is None:
        return tensor
    rows = cut.rows[rank]
    return tensor.narrow(cut.dim, rows.start, rows.numel)


def piece_of(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's run of a whole tensor."""
    for dim in {split.dim for split in layout.splits}:
        full = full.narrow(dim, layout.offsets[dim], layout.cut.shape[dim])
    return run_of(full.contiguous() if layout.splits else full, layout.cut, layout.rank)
