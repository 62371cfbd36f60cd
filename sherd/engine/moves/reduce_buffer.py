"""Where do a group's gradients wait to be reduced? In rows, into which they are copied as they come; one that is sent
from where autograd has left it is its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from sherd.comm.buffers import Buffer
from sherd.comm.transport import Sizes
from sherd.engine.moves.buffer_views import RowViews, sources_for
from sherd.engine.state.group import Group
from sherd.schedule.moments import MemoryKind

BATCH_BYTES = 1 << 20
"""Small gradients wait until this many bytes have come, and are copied in one call."""


class ReduceBuffer:
    """The buffer that gradients are collected in. `filled`: tensors whose elements are in it; `sizes`: of the
    pieces, `shard_sizes`: of what each rank of the shard axis gets the sum of.

    Behind each rank's part there is a flag for every tensor of the group, 1 where this rank has its gradient. Summed
    with the rest they tell a rank without one that others have it: it takes its part of theirs, or the shards would
    drift apart. A large tensor with a group to itself has no flag: without its gradient the group is not reduced.
    """

    def __init__(self, group: Group, buffer: Buffer, num_flags: int) -> None:
        self.buffer = buffer
        self._packing = group.packing
        self._num_flags = num_flags
        self.sizes = Sizes(numel + num_flags for numel in group.sizes) if num_flags else group.sizes
        self.shard_sizes = self.sizes.together(group.mesh.num_owners) if num_flags else group.shard_sizes
        self.filled: set[int] = set()

    @cached_property
    def _places(self) -> RowViews:
        """Made when they are first asked for: a gradient that is sent from where it is needs none."""
        return RowViews(self._packing, self.buffer.tensor, self._num_flags)

    @cached_property
    def views(self) -> list[list[torch.Tensor]]:
        """The places of each tensor's elements."""
        return self._places.tensors

    @classmethod
    def made(cls, group: Group, dtype: torch.dtype) -> ReduceBuffer:
        """Rows of our own, to be used again."""
        num_flags = group.num_flags
        numel = group.packing.gathered_numel + group.packing.num_ranks * num_flags
        return cls(group, Buffer(numel, dtype, group.device), num_flags)

    @classmethod
    def borrowed(cls, group: Group, gradient: torch.Tensor) -> ReduceBuffer:
        """Rows that are the gradient of the group's only tensor, uncopied."""
        rows = cls(group, Buffer.around(gradient.detach().view(-1)), num_flags=0)
        rows.filled.add(0)
        return rows

    def complete(self) -> None:
        """Zeros for what has not come, and the flags."""
        missing = [index for index in range(len(self._packing.slots)) if index not in self.filled]
        for view in (view for index in missing for view in self.views[index]):
            view.zero_()
        for flags in self._places.flags if self._num_flags else ():
            flags.fill_(1)
            for index in missing:
                flags[:, index : index + 1] = 0


class PendingGradients:
    """What no reduction has taken yet: gradients as they came, and `rows` with those that were copied."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        self.rows: ReduceBuffer | None = None
        self._spare: list[ReduceBuffer] = []

    @property
    def has_any(self) -> bool:
        """Whether any gradient is here."""
        return self.waits or (self.rows is not None and bool(self.rows.filled))

    @property
    def waits(self) -> bool:
        """Whether a gradient is here that is not in the rows."""
        return bool(self._waiting)

    def has_waiting(self, index: int) -> bool:
        """Whether a gradient of the group's tensor `index` is here, and not in the rows."""
        return index in self._waiting

    @property
    def is_due(self) -> bool:
        """Whether enough gradients wait to be copied in one call."""
        return self._waiting_bytes >= BATCH_BYTES

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """All of it: what a memory report counts."""
        for gradient in self._waiting.values():
            yield MemoryKind.ARRIVED, gradient
        if self.rows is not None:
            yield MemoryKind.GRADIENT_ROWS, self.rows.buffer.tensor

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Let the gradient of the group's tensor `index` wait."""
        self._waiting[index] = gradient
        self._waiting_bytes += gradient.nbytes

    def borrow(self, gradient: torch.Tensor) -> None:
        """Let the gradient of the group's only tensor be the rows."""
        self.rows = ReduceBuffer.borrowed(self._group, gradient)

    def copy_in(self, scale: float, dtype: torch.dtype) -> None:
        """Move what waits into the rows, of `dtype`, times `scale`: written where nothing is yet, added where something
        is."""
        if not self._waiting:
            return
        rows = self._rows_of(dtype)
        fresh: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        again: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        views, slots = rows.views, self._group.packing.slots
        for index, gradient in self._waiting.items():
            targets, sources = again if index in rows.filled else fresh
            targets.extend(views[index])
            sources.extend(sources_for(views[index], gradient, slots[index].cut))
            rows.filled.add(index)
        self._forget_waiting()
        if again[0]:
            torch._foreach_add_(*again, alpha=scale)
        if scale == 1.0 and fresh[0]:
            torch._foreach_copy_(*fresh)
            return
        for target, source in zip(*fresh, strict=True):
            # Scaled while it is copied; a narrow gradient is widened first, or it would be rounded twice.
            if source.dtype == target.dtype:
                torch.mul(source, scale, out=target)
            else:
                target.copy_(source).mul_(scale)

    def take(self, dtype: torch.dtype) -> ReduceBuffer:
        """The rows, for a reduction; empty ones of `dtype` if nothing has come. They are to be given back."""
        rows, self.rows = self._rows_of(dtype), None
        return rows

    def give_back(self, rows: ReduceBuffer) -> None:
        """A reduction has read them: their memory is free, the views in it are kept for the next ones."""
        if rows.buffer.is_ours:
            rows.filled.clear()
            rows.buffer.free()
            self._spare.append(rows)

    def drop(self) -> None:
        """Give up all that is here."""
        if self.rows is not None:
            self.give_back(self.rows)
            self.rows = None
        self._forget_waiting()

    def drop_of(self, indices: frozenset[int]) -> None:
        """Give up what the rows have of these tensors."""
        if self.rows is not None:
            self.rows.filled -= indices
            if not self.rows.filled:
                self.drop()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _rows_of(self, dtype: torch.dtype) -> ReduceBuffer:
        if self.rows is not None:
            return self.rows
        fitting = next((each for each in self._spare if each.buffer.tensor.dtype == dtype), None)
        if fitting is None:
            fitting = ReduceBuffer.made(self._group, dtype)
        else:
            self._spare.remove(fitting)
        fitting.buffer.allocate()
        self.rows = fitting
        return fitting
