"""Complex tensors as pairs of real numbers and back: how optimizers of torch step complex parameters.

z (4,) complex, in runs       as pairs (4, 2)
rank 0 | z0 z1 z2 |           | re0 im0 re1 im1 re2 im2 |
rank 1 | z3 |                 | re3 im3 |
"""

from __future__ import annotations

from typing import Any

import torch

from sherd._torch import dtensor_of, local_tensor, spec_of
from sherd.layout.runs import Runs
from sherd.tensor.operands import unknown
from sherd.tensor.owned import on_owner
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.table import Args, Kwargs, answers


@answers("view_as_real")
def as_pairs(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view of this rank's run, of twice as many elements."""
    layout = layout_of(spec_of(args[0]))
    if layout.strides:
        return on_owner(func, args, kwargs)
    cut = layout.cut
    at_owner = layout.owner is not None
    pairs = Runs((*cut.shape, 2), cut.num_ranks, cut.first, tuple(2 * end for end in cut.ends), cut.by_rows or at_owner)
    return _placed(func(local_tensor(args[0])), layout, pairs, (*layout.shape, 2))


@answers("view_as_complex")
def as_complex(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view of this rank's run, of half as many elements.

    Raises:
        PlacementError: a pair is cut in two.
    """
    layout = layout_of(spec_of(args[0]))
    cut = layout.cut
    if layout.strides or not cut.shape or cut.shape[-1] != 2 or layout.shape[-1] != 2:
        return on_owner(func, args, kwargs)
    if any(end % 2 for end in cut.ends):
        raise unknown(func, layout, "a pair of numbers is on two ranks")
    shape = cut.shape[:-1]
    numbers = Runs(shape, cut.num_ranks, cut.first, tuple(end // 2 for end in cut.ends), cut.by_rows and bool(shape))
    return _placed(func(local_tensor(args[0]).view(-1, 2)), layout, numbers, layout.shape[:-1])


def _placed(local: torch.Tensor, layout: Layout, cut: Runs, shape: tuple[int, ...]) -> RaggedDTensor:
    """`local`, in the shape that `cut` has it; on the other mesh axes as `layout`."""
    made = layout.recut(cut, shape, layout.placements)
    return dtensor_of(RaggedDTensor, local.view(made.local_shape), made.spec(local.dtype), False)
