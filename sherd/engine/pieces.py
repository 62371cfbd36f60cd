"""The same elements seen twice: in the rows that collectives move, and in the tensors that modules use.

Rows are `[num_ranks, rest_numel]`: row r is rank r's rest buffer. For each tensor of a packing these functions give
matching lists of views, so that one foreach copy moves a whole group.
"""

from __future__ import annotations

import torch

from sherd.layout.packing import Packing, Slot
from sherd.layout.placement import Cut


def row_views(rows: torch.Tensor, slot: Slot) -> list[torch.Tensor]:
    """The places of one tensor's elements in `rows`: as few strided views as can be."""
    cut = slot.cut
    start = slot.rest.start
    if cut.dim is None:
        return [rows[:, start : slot.rest.stop]]
    if cut.in_order:
        full, rest = _full_ranks(cut)
        views = [rows[:full, start : slot.rest.stop]]
        if rest:
            views.append(rows[full : full + 1, start : start + rest])
        return [view for view in views if view.numel()]
    held = [(rank, slot.held(rank).numel) for rank in range(cut.num_ranks)]
    return [rows[rank, start : start + numel].view(cut.local_shape(rank)) for rank, numel in held if numel]


def tensor_views(tensor: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """The parts of `tensor`, of shape `cut.shape`, that belong at `row_views`, in the same order and shapes."""
    if cut.dim is None:
        return [tensor.reshape(1, -1).expand(cut.num_ranks, -1)]
    if cut.in_order:
        full, rest = _full_ranks(cut)
        flat = tensor.reshape(-1)
        views = [flat[: full * cut.slot].view(full, cut.slot)]
        if rest:
            views.append(flat[full * cut.slot :].view(1, rest))
        return [view for view in views if view.numel()]
    return [tensor.narrow(cut.dim, rows.start, rows.numel) for rows in cut.rows if rows.numel and cut.numel]


def _full_ranks(cut: Cut) -> tuple[int, int]:
    """How many ranks hold a full slot, and how many elements the next one holds."""
    if cut.slot == 0:
        return 0, 0
    return divmod(cut.numel, cut.slot)


class CopyOut:
    """Turns gathered rows into whole tensors: one native call for all that are cut in order, one for the others.

    Built once for a group's whole buffer; `whole` is 1-D, its views are made here and stay valid while it is allocated.
    """

    def __init__(self, packing: Packing, whole: torch.Tensor) -> None:
        self._packing = packing
        runs = sorted((slot for slot in packing.slots if slot.cut.in_order), key=lambda slot: slot.rest.start)
        self._sizes: list[int] = []
        self._outs: list[torch.Tensor] = []
        end = 0
        for slot in runs:
            self._skip(slot.rest.start - end, whole)
            self._sizes.append(slot.rest.numel)
            self._outs.append(whole[slot.whole.start : slot.whole.stop].view(packing.num_ranks, slot.rest.numel))
            end = slot.rest.stop
        self._end = end
        self._scattered: list[tuple[Slot, list[torch.Tensor]]] = []
        for slot in packing.slots:
            if not slot.cut.in_order:
                tensor = whole[slot.whole.start : slot.whole.stop].view(slot.cut.shape)
                self._scattered.append((slot, tensor_views(tensor, slot.cut)))

    def _skip(self, gap: int, whole: torch.Tensor) -> None:
        """Padding between slots is split off with the rest; it needs somewhere to go."""
        if gap:
            self._sizes.append(gap)
            self._outs.append(torch.empty(self._packing.num_ranks, gap, dtype=whole.dtype, device=whole.device))

    def __call__(self, rows: torch.Tensor) -> None:
        """Copy `rows`, 1-D as collectives have it, out into the whole buffer."""
        by_rank = rows.view(self._packing.num_ranks, self._packing.rest_numel)
        if self._outs:
            torch.split_with_sizes_copy(by_rank[:, : self._end], self._sizes, dim=1, out=self._outs)
        if self._scattered:
            sources = [view for slot, _ in self._scattered for view in row_views(by_rank, slot)]
            targets = [view for _, views in self._scattered for view in views]
            if targets:  # they may all be empty tensors
                torch._foreach_copy_(targets, sources)
