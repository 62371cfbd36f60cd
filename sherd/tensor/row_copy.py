"""Copies from rows into a run that begins or ends inside a row.

`set_model_state_dict(..., broadcast_from_rank0=True)` asks the placements for this rank's rows, cuts them out of the
unsharded tensor, and copies them into `to_local()`. A run that is not of whole rows is told as the rows around it; if
one placement alone does not tell which rows those are, as all rows. The copy that follows takes the run out of them:

    shape (4, 5), this rank holds elements 3 to 17       told: rows 0 to 4       copied: elements 3 to 17 of them
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from sherd._torch import NO_TORCH_FUNCTION
from sherd.layout.runs import Runs

# torch makes slices of the answer, which can carry nothing else, and asks for `to_local()` next. So the answer is kept
# for this thread until then (test_rows_that_torch_asks_for_are_taken_by_the_next_local_tensor_alone). A run that could
# always take rows would be of a subclass, on which optimizers lose their fused kernels.
_told: ContextVar[Runs | None] = ContextVar("told", default=None)


def rows_told(cut: Runs, num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Returns how many of `num_rows` rows torch is told that `rank` holds, one of `num_ranks` on a mesh axis, and the
    first of them. They are more than the run if that is not of whole rows."""
    _told.set(cut)
    if num_ranks != cut.num_ranks or not cut.shape or num_rows != cut.shape[0]:
        return num_rows, 0
    piece = cut.piece(rank)
    if not piece.numel or not cut.inner:
        count, first = cut.local_shape(rank)[0] if cut.by_rows else 0, 0
    else:
        first = piece.start // cut.inner
        count = -(-piece.stop // cut.inner) - first
    return count, first


class _Run(torch.Tensor):
    """A run that can be copied into from the rows around it, or from all rows. In all else it is a plain tensor, as are
    its views."""

    __torch_function__ = NO_TORCH_FUNCTION
    cut: Runs
    rank: int

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy this rank's elements out of `source`: all rows, the rows around them, or what has the run's shape."""
        cut, piece, shape = self.cut, self.cut.piece(self.rank), tuple(source.shape)
        if shape != cut.local_shape(self.rank):
            start = piece.start if shape == cut.shape else piece.start % max(cut.inner, 1)
            source = source.reshape(-1)[start : start + piece.numel].view(cut.local_shape(self.rank))
        return super().copy_(source, non_blocking)


def as_told(local: torch.Tensor, cut: Runs, rank: int) -> torch.Tensor:
    """Returns the run `local` itself; just after torch was told of its rows, a view of it that takes these rows."""
    if _told.get() != cut:
        return local
    _told.set(None)
    run = local.as_subclass(_Run)
    run.cut, run.rank = cut, rank
    return run
