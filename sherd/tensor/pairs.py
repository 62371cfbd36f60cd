"""Complex tensors as pairs of real numbers and back, as optimizers of torch step complex parameters.

z (4,) complex, in runs       as pairs (4, 2)
rank 0 | z0 z1 z2 |           | re0 im0 re1 im1 re2 im2 |
rank 1 | z3 |                 | re3 im3 |
"""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sherd._torch import DTensorSpec, local_tensor, spec_of
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.operands import on_owner, unknown
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result
from sherd.tensor.table import Args, Aten, Kwargs, answers

Shardings = list[tuple[list[Replicate | Shard], list[Replicate | Shard]]]


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


@functools.cache
def see_complex_shards_as_pairs() -> None:
    """Let `view_as_real` of torch's own DTensor be a view of its shard, however it is sharded.

    Torch replicates a tensor that is sharded on its last dim, a vector say, and makes pairs of that copy. Adam and its
    like step the copy, and train nothing (`test_complex_parameters_train_under_every_placement`).
    """

    def shardings(tensor: DTensorSpec) -> Shardings:
        sharded: Shardings = [([Shard(dim)], [Shard(dim)]) for dim in range(tensor.ndim)]
        return [([Replicate()], [Replicate()]), *sharded]

    register_sharding(torch.ops.aten.view_as_real.default)(shardings)
