"""The cuts that the tests of ragged tensors use, and tensors of them."""

from functools import partial
from math import prod

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from sherd._torch import dtensor_spec
from sherd.errors import PlacementError
from sherd.layout.plan import Wanted, plan
from sherd.layout.runs import Blocks, Flat, Owned, Runs
from sherd.tensor.placement import RaggedShard
from sherd.tensor.ragged import distribute_ragged
from tests.support import refusals

SHAPES = ((7, 6), (3, 4, 5), (5,), (1,), (1, 9), (), (4, 1, 3))
KINDS = ("uneven", "rows", "last", "flat", "blocks", "whole")


def uneven(shape, num_ranks):
    """Runs of elements, each longer than the one before; the first of more than two ranks holds nothing."""
    numel = prod(shape)
    ends = [numel * rank * rank // (num_ranks - 1 or 1) ** 2 for rank in range(num_ranks - 1)]
    return Runs(shape, num_ranks, 0, (*ends, numel))


def rows(shape, num_ranks):
    """Rows: one to the first rank, none to the second, the rest as it comes."""
    if not shape:
        return uneven(shape, num_ranks)
    inner, left, ends = prod(shape[1:]), shape[0], []
    for rank in range(num_ranks - 1):
        taken = (1, 0, 2)[rank % 3]
        left = max(0, left - taken)
        ends.append((shape[0] - left) * inner)
    return Runs(shape, num_ranks, 0, (*ends, prod(shape)), by_rows=True)


def last(shape, num_ranks):
    """All of it on the last rank."""
    return Runs(shape, num_ranks, num_ranks - 1, (prod(shape),), by_rows=bool(shape))


def cuts(kind, shapes, num_ranks):
    """A cut for each shape."""
    made = {"uneven": uneven, "rows": rows, "last": last}
    if kind in made:
        return [made[kind](shape, num_ranks) for shape in shapes]
    placement = {"flat": Flat(), "blocks": Blocks(2), "whole": Owned()}[kind]
    return list(plan([Wanted(shape, placement, str(shape)) for shape in shapes], num_ranks))


def line(num_ranks):
    """A 1-D mesh."""
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))


def spec_for(cut, mesh, dtype=torch.float32):
    """On a 1-D mesh, or on a (replicate, shard) mesh."""
    placements = (*(Replicate(),) * (mesh.ndim - 1), RaggedShard(cut))
    return dtensor_spec(mesh, placements, torch.Size(cut.shape), dtype)


def ragged(whole, cut, mesh):
    """`whole` cut as `cut`, in memory of its own."""
    return distribute_ragged(whole, spec_for(cut, mesh, whole.dtype)).clone()


def local_of(whole, cut, rank):
    """What a rank has to hold of `whole`, put together without anything that is tested here."""
    piece = cut.piece(rank)
    return whole.reshape(-1)[piece.start : piece.stop].reshape(cut.local_shape(rank)).clone()


def numbers(shape, dtype=torch.float32, seed=0):
    """A tensor that is the same in every thread and process."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + prod(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32 if dtype.itemsize < 4 else dtype).to(dtype)


def whole_of(tensor):
    """What any DTensor is, as a plain tensor."""
    return tensor.full_tensor().detach()


refusal = partial(refusals.refusal, PlacementError)
"""What the PlacementError of a call says."""
