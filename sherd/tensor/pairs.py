"""Complex tensors as pairs of real numbers and back, as optimizers of torch step complex parameters.

z (4,) complex, in runs       as pairs (4, 2)
rank 0 | z0 z1 z2 |           | re0 im0 re1 im1 re2 im2 |
rank 1 | z3 |                 | re3 im3 |
"""

from __future__ import annotations

import torch

from sherd._torch import dtensor_spec, local_tensor, spec_of
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.operands import on_owner, unknown
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result
from sherd.tensor.sharded import sharded_dtensor
from sherd.tensor.table import SHARDED, Args, Aten, Kwargs, answers


@answers("view_as_real")
def as_pairs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of this rank's run, with twice as many elements."""
    layout = layout_of(spec_of(args[0]))
    if layout.strides:
        return on_owner(func, args, kwargs)
    cut = layout.cut
    at_owner = layout.owner is not None
    pairs = Runs((*cut.shape, 2), cut.num_ranks, cut.first, tuple(2 * end for end in cut.ends), cut.by_rows or at_owner)
    return _recut(func(local_tensor(args[0])), layout, pairs, (*layout.shape, 2))


@answers("view_as_complex")
def as_complex(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of this rank's run, with half as many elements.

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
    return _recut(func(local_tensor(args[0]).view(-1, 2)), layout, numbers, layout.shape[:-1])


def _recut(local: torch.Tensor, layout: Layout, cut: Runs, shape: Shape) -> RaggedDTensor:
    """Returns `local` as a tensor of `shape` that is cut as `cut`, and lies as `layout` on the other mesh axes."""
    made = layout.recut(cut, shape, layout.placements)
    return as_result(local.view(made.local_shape), made)


@SHARDED.answers("view_as_real")
def chunk_as_pairs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of this rank's chunk. Torch replicates a tensor that is sharded on its last dim, a vector say, and
    makes pairs of that copy; Adam and its like would step the copy, and train nothing."""
    tensor = args[0]
    local, spec = func(local_tensor(tensor)), spec_of(tensor)
    shape, strides = torch.Size((*tensor.shape, 2)), (*(2 * each for each in spec.stride), 1)
    return sharded_dtensor(local, dtensor_spec(spec.mesh, spec.placements, shape, local.dtype, strides))
