"""From runs to the unsharded tensor on all ranks, and from an unsharded tensor to the run of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist

from sherd._torch import all_gather_single
from sherd.comm.failures import announced, named
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs
from sherd.tensor.placement import AxisSplit, Layout, Places

PADDING_LIMIT = 2
"""An all-gather pads every shard to the largest: it is used up to this many times the tensor's size. Beyond, each rank
broadcasts its shard."""


def gather(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the unsharded tensor, in memory of its own. All ranks that hold a shard must call it."""
    part = gather_part(local, layout)
    for split in reversed(layout.splits):
        part = _joined_on_dim(part, split, layout)
    return part


def gather_part(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the runs of all ranks joined, in memory of its own. All ranks of the axes of the runs must call it.

    That is the unsharded tensor, or the part of it that axes with `Shard(dim)` leave to this rank. The axes are
    gathered one after the other, the fastest first, so that joined shards follow one another.

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
    return line.view(cut.shape) if num_joined > 1 else line.view(cut.shape).clone()  # else it is the shard's memory


def _joined_on_dim(part: torch.Tensor, split: AxisSplit, layout: Layout) -> torch.Tensor:
    """Returns the parts of all ranks of an axis with `Shard(dim)`, side by side."""
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
    """Returns the lines of all ranks of a group one after the other; rank i has `numels[i]` elements."""
    full = torch.empty(sum(numels), dtype=line.dtype, device=line.device)
    if full.numel():
        # As bytes, since every backend can move those. A tensor of one element is contiguous with any stride, but can
        # be viewed as bytes with stride 1 only.
        sizes = [numel * full.element_size() for numel in numels]
        line = line if line.stride(0) == 1 else line.clone(memory_format=torch.contiguous_format)
        what = "the gather of a RaggedDTensor"
        with announced((group,), f"gathers a tensor of {full.numel()} elements", what), named(what, group):
            _gather_bytes(line.view(torch.uint8), full.view(torch.uint8), sizes, rank, group)
    return full


def _gather_bytes(
    local: torch.Tensor, full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup
) -> None:
    largest = max(sizes)
    if largest * len(sizes) == full.numel():
        all_gather_single(full, local, group=group)
    elif largest * len(sizes) > PADDING_LIMIT * full.numel():
        _broadcast_pieces(full.split(list(sizes)), local, rank, group)
    else:
        padded = local.new_zeros(largest)
        padded[: local.numel()] = local
        gathered = local.new_empty(largest * len(sizes))
        all_gather_single(gathered, padded, group=group)
        for piece, padded_piece in zip(full.split(list(sizes)), gathered.split(largest), strict=True):
            piece.copy_(padded_piece[: piece.numel()])


def _broadcast_pieces(pieces: Sequence[torch.Tensor], local: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Fill `pieces`: each rank that has a shard sends it to all."""
    works = []
    for sender, piece in enumerate(pieces):
        if not piece.numel():
            continue
        if sender == rank:
            piece.copy_(local)
        works.append(dist.broadcast(piece, group=group, group_src=sender, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def part_given(
    value: torch.Tensor, shape: tuple[int, ...], local: torch.Tensor, piece: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """Returns this rank's part of a user's `value` for a tensor of `shape`. None: `value` has another shape.

    `value` is an unsharded tensor, of which `piece` returns the rank's part, or a part as large as `local`.
    """
    value = value.detach()
    if tuple(value.shape) == shape:
        return piece(value)
    return value.view_as(local) if value.dim() in (1, local.dim()) and value.numel() == local.numel() else None


def counted_here(local: torch.Tensor, layout: Places) -> list[torch.Tensor]:
    """Returns the views of this rank's run that a reduction counts, in order. Each element counts on one rank."""
    if layout.counted is None:
        return [local]
    line = local.reshape(-1)
    return [line[extent.start : extent.stop] for extent in layout.counted]


def shard_of(tensor: torch.Tensor, cut: Cut | Runs, rank: int) -> torch.Tensor:
    """Returns the shard of `rank`, in its local shape: a view if `tensor` is contiguous or cut on a dim."""
    if isinstance(cut, Runs):
        piece = cut.piece(rank)
        return tensor.reshape(-1)[piece.start : piece.stop].view(cut.local_shape(rank))
    if cut.dim is None:
        return tensor
    rows = cut.rows[rank]
    if rows.numel and hasattr(tensor, "fsdp_pre_all_gather"):
        # As FSDP2 cuts: of all ways, torchao's NF4 knows this one alone.
        piece = tensor.split(cut.rows[0].numel, cut.dim)[rank]
        if type(piece) is type(tensor):
            return piece
    return tensor.narrow(cut.dim, rows.start, rows.numel)


def piece_of(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns this rank's run of an unsharded tensor, which other mesh axes may shard on a dim."""
    for dim in {split.dim for split in layout.splits}:
        full = full.narrow(dim, layout.offsets[dim], layout.cut.shape[dim])
    return shard_of(full.contiguous() if layout.splits else full, layout.cut, layout.rank)
