"""The meshes that the tests put ragged tensors on, and where each element then has to be."""

from dataclasses import dataclass
from math import prod

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from sherd.tensor.placement import ragged_spec
from sherd.tensor.ragged import ragged_dtensor
from tests.tensor.cuts import cuts, local_of


@dataclass(frozen=True)
class Grid:
    """A mesh; what a tensor is on it before it is cut (`shards[axis]`: the dim it is sharded on); the axes of the cut,
    the slowest first."""

    sizes: tuple
    shards: tuple
    axes: tuple

    @property
    def num_ranks(self):
        return prod(self.sizes)

    def mesh(self):
        return init_device_mesh("cpu", self.sizes, mesh_dim_names=tuple(f"axis{at}" for at in range(len(self.sizes))))


LINES = {f"{size} in a row": Grid((size,), (None,), (0,)) for size in (1, 2, 3, 4)}
FOUR = {
    "tp columns": Grid((2, 2), (None, 1), (0,)),
    "tp rows": Grid((2, 2), (None, 0), (0,)),
    "tp rows, the other way round": Grid((2, 2), (0, None), (1,)),
    "tp copies": Grid((2, 2), (None, None), (0,)),
    "two axes": Grid((2, 2), (None, None), (1, 0)),
    "two axes, the other way round": Grid((2, 2), (None, None), (0, 1)),
}
EIGHT = {
    "copies and rows": Grid((2, 2, 2), (None, None, 0), (1,)),
    "two axes and columns": Grid((2, 2, 2), (None, None, 1), (1, 0)),
    "rows between two axes": Grid((2, 2, 2), (None, 0, None), (2, 0)),
    "rows of rows": Grid((2, 2, 2), (None, 0, 0), (0,)),
    "columns and rows": Grid((2, 2, 2), (1, None, 0), (1,)),
    "three axes": Grid((2, 2, 2), (None, None, None), (1, 2, 0)),
    "two by four": Grid((2, 4), (None, None), (1, 0)),
    "four by two": Grid((4, 2), (None, None), (1, 0)),
    "one beside": Grid((1, 4, 2), (0, None, 1), (1,)),
}
GRIDS = LINES | FOUR | EIGHT


def on_grids(names):
    """A test's parameters `grid`, which are these in turn, and `num_ranks`, for `on_threads()` and `on_processes()`."""
    given = [pytest.param(GRIDS[name].num_ranks, GRIDS[name], id=name) for name in names]
    return pytest.mark.parametrize(("num_ranks", "grid"), given)


def placements_of(grid, shape):
    """What a tensor of `shape` is before it is cut; dims that it does not have shard nothing."""
    return tuple(Replicate() if dim is None or dim >= len(shape) else Shard(dim) for dim in grid.shards)


def part_of(whole, grid, mesh):
    """What is left to this rank before the cut."""
    for axis, dim in enumerate(grid.shards):
        if dim is not None and dim < whole.ndim:
            parts, at = whole.chunk(mesh.size(axis), dim), mesh.get_local_rank(axis)
            whole = parts[at] if at < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def cut_on(grid, mesh, kind, whole):
    """What is left to this rank of `whole`, and how that is cut."""
    part = part_of(whole, grid, mesh)
    return part, *cuts(kind, [tuple(part.shape)], prod(mesh.size(axis) for axis in grid.axes))


def local_on(grid, mesh, kind, whole):
    """What this rank has to hold, put together without anything that is tested here."""
    part, cut = cut_on(grid, mesh, kind, whole)
    number = 0
    for axis in grid.axes:
        number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return local_of(part, cut, number)


def ragged_on(grid, mesh, kind, whole):
    """`whole` as a ragged tensor, in memory of its own."""
    _, cut = cut_on(grid, mesh, kind, whole)
    spec = ragged_spec(mesh, placements_of(grid, whole.shape), whole.shape, whole.dtype, cut, grid.axes)
    return ragged_dtensor(local_on(grid, mesh, kind, whole), spec)
