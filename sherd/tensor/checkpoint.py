"""What does a rank write and read of a ragged tensor in a distributed checkpoint? Its run, as rectangles.

So the file is the same as any other: it loads under another layout, another number of ranks, or unsharded.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sherd.tensor.placement import Layout
from sherd.tensor.rectangles import Rectangle, rectangles


def _rectangles(layout: Layout) -> tuple[Rectangle, ...]:
    """Those of this rank's run, in the part of the tensor that is cut into runs."""
    cut = layout.cut
    if not layout.numel and layout.rank == cut.first:
        # Or a tensor without elements would not be in the checkpoint, and be missed when it is loaded.
        return (Rectangle(0, (0,) * len(cut.shape), cut.shape),)
    return rectangles(cut.shape, cut.piece(layout.rank))


def _place(rectangle: Rectangle, layout: Layout) -> torch.Size:
    """Where a rectangle begins in the whole tensor."""
    return torch.Size([start + offset for start, offset in zip(layout.offsets, rectangle.offsets, strict=True)])


def chunk_list(layout: Layout) -> list[ChunkStorageMetadata]:
    """Where this rank's rectangles are."""
    return [
        ChunkStorageMetadata(offsets=_place(each, layout), sizes=torch.Size(each.sizes)) for each in _rectangles(layout)
    ]


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[WriteItem]:
    """One item for each rectangle."""
    properties = TensorProperties.create_from_tensor(local)
    size = torch.Size(layout.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunk_list(layout)
    ]


def rectangle_at(index: MetadataIndex, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The rectangle that begins at `index.offset`, a view of this rank's run."""
    first = layout.cut.piece(layout.rank).start
    for each in _rectangles(layout):
        if index.offset is None or _place(each, layout) == index.offset:
            start = each.start - first
            return local.detach().view(-1)[start : start + each.numel].view(each.sizes)
    raise ValueError(f"{index.fqn}: rank {layout.rank} holds no rectangle of the tensor at {index.offset}")
