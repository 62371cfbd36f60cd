"""The run of a ragged tensor in a distributed checkpoint: rectangles, which a rank writes and reads.

So the file is the same as any other: it loads under another layout, another number of ranks, or unsharded.

A run of the flattened tensor is a few elements that end a row, whole rows, and a few elements that begin a row. In more
dimensions each of those elements is a row that is cut the same way: at most 2 * ndim - 1 rectangles.

    shape (4, 5), elements 3 to 17

        . . . a a        a: row 0, columns 3 to 5
        b b b b b        b: rows 1 and 2, all columns
        b b b b b
        c c . . .        c: row 3, columns 0 to 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sherd.layout.extent import Extent
from sherd.layout.placement import Shape
from sherd.tensor.placement import Layout


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor that has a first index and a size in each dim, and is one run of `numel` elements from
    `start` on."""

    start: int
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)


@lru_cache(maxsize=4096)
def rectangles(shape: Shape, run: Extent) -> tuple[Rectangle, ...]:
    """Returns the rectangles that make up `run` of the flattened tensor, in order."""
    if not run.numel:
        return ()
    if not shape:
        return (Rectangle(run.start, (), ()),)
    inner = prod(shape[1:])
    found: list[Rectangle] = []
    start = run.start
    while start < run.stop:
        row, behind = divmod(start, inner)
        num_rows = (run.stop - start) // inner
        if not behind and num_rows:
            found.append(Rectangle(start, (row,) + (0,) * (len(shape) - 1), (num_rows, *shape[1:])))
            start += num_rows * inner
        else:
            numel = min(run.stop - start, inner - behind)
            for part in rectangles(shape[1:], Extent(behind, numel)):
                found.append(Rectangle(row * inner + part.start, (row, *part.offsets), (1, *part.sizes)))
            start += numel
    return tuple(found)


def _placed(layout: Layout) -> list[tuple[torch.Size, Rectangle]]:
    """Returns the rectangles of this rank's run, and where each begins in the unsharded tensor."""
    cut = layout.cut
    found = rectangles(cut.shape, cut.piece(layout.rank))
    if not layout.numel and layout.rank == cut.first:
        # Or a tensor without elements would not be in the checkpoint, and be missed when it is loaded.
        found = (Rectangle(0, (0,) * len(cut.shape), cut.shape),)
    return [
        (torch.Size(start + offset for start, offset in zip(layout.offsets, part.offsets, strict=True)), part)
        for part in found
    ]


def chunk_list(layout: Layout) -> list[ChunkStorageMetadata]:
    """Returns where this rank's rectangles are."""
    return [ChunkStorageMetadata(offsets=place, sizes=torch.Size(part.sizes)) for place, part in _placed(layout)]


def write_items(name: str, local: torch.Tensor, layout: Layout) -> list[WriteItem]:
    """Returns one item for each rectangle."""
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
    """Returns the rectangle that begins at `index.offset`, a view of this rank's run."""
    first = layout.cut.piece(layout.rank).start
    for place, part in _placed(layout):
        if index.offset is None or place == index.offset:
            start = part.start - first
            return local.detach().view(-1)[start : start + part.numel].view(part.sizes)
    raise ValueError(f"{index.fqn}: rank {layout.rank} holds no rectangle of the tensor at {index.offset}")
