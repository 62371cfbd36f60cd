"""The buffer that one reduce-scatter sends: a group's gradients, rank by rank, and a flag for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from sherd.comm.buffers import Buffer
from sherd.comm.streams import Lane
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.buffer_views import RowViews
from sherd.engine.state.group import Group


class ReduceBuffer:
    """The buffer that gradients are collected in. `filled`: tensors whose elements are in it.

    Behind each rank's part there is a flag for every tensor of the group, 1 where this rank has its gradient. Summed
    with the rest they tell a rank without one that others have it: it takes its part of theirs, or the shards would
    drift apart. A large tensor with a group to itself has no flag: without its gradient the group is not reduced.
    """

    def __init__(self, group: Group, buffer: Buffer, lane: Lane | None = None) -> None:
        self.buffer = buffer
        self._lane = lane
        self._packing = group.packing
        self._num_flags = group.num_flags
        self.filled: set[int] = set()

    @cached_property
    def _places(self) -> RowViews:
        """Made when they are first asked for: a gradient that is sent from where it is needs none."""
        return RowViews(self._packing, self.buffer.tensor, self._num_flags)

    @classmethod
    def made(cls, group: Group, plan: BufferPlan, dtype: torch.dtype, lane: Lane | None) -> ReduceBuffer:
        """Returns rows of our own, to be used again, without memory yet: that is compute's, or that of `lane`."""
        buffer = Buffer(sum(plan.reduced_by_piece), dtype, group.device)
        buffer.free()
        return cls(group, buffer, lane)

    @classmethod
    def borrowed(cls, group: Group, gradient: torch.Tensor) -> ReduceBuffer:
        """Returns rows that are the gradient of the group's only tensor, uncopied. That group has no flags."""
        rows = cls(group, Buffer.around(gradient.detach().view(-1)))
        rows.filled.add(0)
        return rows

    def _allocate(self) -> None:
        if self._lane is None:
            self.buffer.allocate()
        else:
            self._lane.lend(self.buffer.allocate)

    def fill(self, gradients: Mapping[int, torch.Tensor], scale: float) -> None:
        """Copy in `gradients`, by their parameters' indices in the group, times `scale`. One of a parameter that is
        `filled` is added to what is there."""
        if torch.is_grad_enabled():  # in a backward that is differentiated, or after one
            with torch.no_grad():
                self.fill(gradients, scale)
            return
        if not self.filled:
            self._allocate()
        again = self.filled.intersection(gradients) if self.filled else ()
        fresh = {at: each for at, each in gradients.items() if at not in again} if again else gradients
        targets, sources = self._places.pairs({at: gradients[at] for at in again}) if again else ([], [])
        if targets:  # tensors may have no elements
            torch._foreach_add_(targets, sources, alpha=scale)
        targets, sources = self._places.pairs(fresh)
        if scale == 1.0 and targets:
            torch._foreach_copy_(targets, sources)
        for target, source in zip(targets, sources, strict=True) if scale != 1.0 else ():
            # Scaled while it is copied; a narrow gradient is widened first, or it would be rounded twice.
            if source.dtype == target.dtype:
                torch.mul(source, scale, out=target)
            else:
                target.copy_(source).mul_(scale)
        self.filled.update(gradients)

    def complete(self) -> None:
        """Write zeros where no gradient has come, and the flags."""
        if not self.filled:
            self._allocate()
        missing = [index for index in range(len(self._packing.slots)) if index not in self.filled]
        for view in (view for index in missing for view in self._places.tensors[index]):
            view.zero_()
        for flags in self._places.flags if self._num_flags else ():
            flags.fill_(1)
            for index in missing:
                flags[:, index : index + 1] = 0
