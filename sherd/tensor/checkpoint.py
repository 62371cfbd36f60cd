"""The run of a ragged tensor in a distributed checkpoint: boxes, which a rank writes and reads.

So the file is the same as any other: it loads under another layout, another number of ranks, or unsharded.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sherd.layout.boxes import Box, boxes_of_run, whole
from sherd.tensor.placement import Layout


def boxes_here(layout: Layout) -> list[tuple[Box, int]]:
    """Returns the boxes of the unsharded tensor that make up this rank's run, and where each begins in the run."""
    cut = layout.cut
    found = boxes_of_run(cut.shape, cut.piece(layout.rank))
    if not layout.numel and layout.rank == cut.first:
        # Or a tensor without elements would not be in the checkpoint, and be missed when it is loaded.
        found = (whole(cut.shape),)
    starts = accumulate((box.numel for box in found), initial=0)
    return [
        (Box(tuple(map(sum, zip(layout.offsets, box.offsets, strict=True))), box.sizes), start)
        for box, start in zip(found, starts, strict=False)
    ]


def chunk_list(layout: Layout) -> list[ChunkStorageMetadata]:
    """Returns where this rank's boxes are."""
    return [
        ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
        for box, _ in boxes_here(layout)
    ]


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[WriteItem]:
    """Returns one item for each box."""
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


def box_at(index: MetadataIndex, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the box that begins at `index.offset`, a view of this rank's run."""
    for box, start in boxes_here(layout):
        if index.offset is None or box.offsets == tuple(index.offset):
            return local.detach().view(-1)[start : start + box.numel].view(box.sizes)
    raise ValueError(f"{index.fqn}: rank {layout.rank} holds no box of the tensor at {index.offset}")
