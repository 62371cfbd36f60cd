"""How does a run that begins or ends inside a row take its elements from rows that torch has cut out for it?

`set_model_state_dict(..., broadcast_from_rank0=True)` asks the placements for this rank's rows, cuts them out of the
whole tensor, and copies them into `to_local()`. The run is part of the rows around it, or, if one placement alone does
not tell which those are, of all rows; so, to that one question, the answer is the run in a tensor that can take them.

    shape (4, 5), this rank holds elements 3 to 17       asked: rows 0 to 4       copied: 3 to 17 of them
"""

from __future__ import annotations

from typing import Any

import torch

from sherd._torch import NO_TORCH_FUNCTION
from sherd.tensor.gather import run_of
from sherd.tensor.placement import Layout


class _Run(torch.Tensor):
    """A run that can be copied into from the rows around it, or from all. In all else it is a plain tensor, as are its
    views."""

    __torch_function__ = NO_TORCH_FUNCTION
    layout_of_run: Layout

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        """Copy this rank's elements out of `source`: all rows, those around them, or what has the run's own shape."""
        cut, rank = self.layout_of_run.cut, self.layout_of_run.rank
        if tuple(source.shape) == cut.shape:
            source = run_of(source, cut, rank)
        elif source.shape[1:] == cut.shape[1:] and len(cut.shape) > 1 and not cut.by_rows:
            piece = cut.piece(rank)
            start = piece.start % max(cut.inner, 1)
            source = source.reshape(-1)[start : start + piece.numel]
        return super().copy_(source, non_blocking)


def as_asked_for(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The run itself; just after torch has cut out more than the run, one that takes this."""
    gave_more, layout.shard.gave_more = layout.shard.gave_more, False
    if not gave_more:
        return local
    run = local.as_subclass(_Run)
    run.layout_of_run = layout
    return run
