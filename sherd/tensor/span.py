"""Spans: neighbouring shards of a buffer as one vector.

shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |
spans            |    span 0    |   |    span 1   |      parameters, gradients and states are laid out alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sherd.layout.extent import Extent


@dataclass(frozen=True, slots=True)
class Span:
    """The extents of the members of a vector of `numel` elements. There may be gaps between members."""

    numel: int
    extents: tuple[Extent, ...]

    @property
    def gaps(self) -> list[Extent]:
        in_order = sorted((extent for extent in self.extents if extent.numel), key=lambda extent: extent.start)
        return [Extent(one.stop, other.start - one.stop) for one, other in pairwise(in_order) if one.stop < other.start]

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns the members' parts of `vector`, 1-D and uncopied."""
        return [vector[extent.start : extent.stop] for extent in self.extents]

    def vector(self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Returns a vector with copies of the members' parts. Gaps, and members whose part is None, are zero."""
        device = next(part.device for part in parts if part is not None)
        vector = torch.zeros(self.numel, dtype=dtype, device=device)
        for view, part in zip(self.views(vector), parts, strict=True):
            if part is not None:
                view.copy_(part.reshape(-1))
        return vector
