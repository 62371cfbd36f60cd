"""The pieces of a tensor that ranks hold: this rank's, and which file each rank's piece goes to.

Every rank finds out by itself, from the layouts of its tensors; ranks exchange nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, local_tensor, spec_of, split_factor_of
from sherd.checkpoint.tensor_bytes import dtype_name
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid, GridCut, cell, whole
from sherd.layout.placement import Shape
from sherd.tensor.placement import is_ragged, layout_of
from sherd.tensor.ragged import boxes_here


@dataclass(frozen=True, slots=True)
class Copies:
    """How a mesh holds tensors of certain placements, of which it may hold several copies.

    Args:
        files: the files of the mesh's ranks, from which ranks know that they mean the same mesh.
        firsts: the file of the first piece of each copy.
        cuts: how a copy is cut; None: each rank lists its own pieces.
        own: the copy that this rank has a piece of; None if it is not in the mesh.
    """

    files: tuple[int, ...]
    firsts: tuple[int, ...]
    cuts: tuple[GridCut, ...] | None
    own: int | None


@dataclass(frozen=True)
class Described:
    """A tensor that is saved, as this rank sees it. `copies` is None if each rank has it whole: a plain tensor, or one
    without elements."""

    dtype: str
    shape: Shape
    copies: Copies | None

    @cached_property
    def variant(self) -> tuple[object, ...]:
        """The key that this rank and another one share if they hold pieces, or copies, of one tensor."""
        of_mesh = (self.copies.files, self.copies.firsts, self.copies.cuts) if self.copies else None
        return self.dtype, self.shape, of_mesh


class Layouts:
    """The layouts of the tensors of one save, each looked at once. `ranks` are those that save, each to a file of its
    own, by its number among them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: number for number, rank in enumerate(ranks)}
        self._known: dict[tuple[object, ...], Copies] = {}

    def described(self, name: str, tensor: torch.Tensor) -> Described:
        """Returns the description of `tensor`, which is called `name`.

        Raises:
            CheckpointError: its dtype or layout is one that files do not have.
        """
        copies = self._copies(name, spec_of(tensor)) if isinstance(tensor, DTensor) and tensor.numel() else None
        return Described(dtype_name(tensor.dtype, name), tuple(tensor.shape), copies)

    def _copies(self, name: str, spec: DTensorSpec) -> Copies:
        is_of_runs = is_ragged(spec)
        how = layout_of(spec).copied_axes if is_of_runs else tuple(spec.placements)
        key = (spec.mesh, is_of_runs, how)
        if key not in self._known:
            files = self._files_of(name, spec.mesh)
            if is_of_runs:
                self._known[key] = _held(spec.mesh, files, layout_of(spec).copied_axes, None)
            else:
                order = _order_of(name, spec)
                rest = tuple(axis for axis in range(spec.mesh.ndim) if axis not in order)
                self._known[key] = _held(spec.mesh, files, rest, _cuts(spec, files, order))
        return self._known[key]

    def _files_of(self, name: str, mesh: DeviceMesh) -> tuple[int, ...]:
        """Returns the file of each rank of `mesh`, the last axis fastest."""
        ranks = mesh.mesh.flatten().tolist()
        if absent := [rank for rank in ranks if rank not in self._files]:
            raise CheckpointError(f"{name} lies on ranks {absent[:8]}, too, which do not save; leave out the group")
        return tuple(self._files[rank] for rank in ranks)


def pieces_here(name: str, tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Returns this rank's pieces of `tensor`, each with its memory. A plain tensor is one piece, and so is one without
    elements."""
    if not tensor.numel():
        return [(whole(tuple(tensor.shape)), torch.empty(tensor.shape, dtype=tensor.dtype))]
    if not isinstance(tensor, DTensor):
        return [(whole(tuple(tensor.shape)), tensor.detach())]
    spec, local = spec_of(tensor), local_tensor(tensor).detach()
    if is_ragged(spec):
        return _runs_here(spec, local)
    box = _cell_here(name, spec)
    if box is None:
        return []
    if tuple(local.shape) != box.sizes:
        raise CheckpointError(
            f"{name}: this rank holds {tuple(local.shape)} of {tuple(tensor.shape)}, where {spec.placements} on "
            f"{spec.mesh} makes it {box.sizes}; a checkpoint holds tensors that are cut as torch.chunk cuts"
        )
    return [(box, local)] if box.numel else []


def sampled(name: str, tensor: torch.Tensor) -> dict[int, complex]:
    """Returns the elements of `tensor`, by their number in it, that this rank holds of some 64 all over it."""
    found: dict[int, complex] = {}
    at = torch.arange(0, tensor.numel(), max(tensor.numel() // 64, 1))
    for box, part in pieces_here(name, tensor):
        index = [of - first for of, first in zip(torch.unravel_index(at, tensor.shape), box.offsets, strict=True)]
        within = [(of >= 0) & (of < size) for of, size in zip(index, box.sizes, strict=True)]
        inside = torch.stack([torch.ones_like(at, dtype=torch.bool), *within]).all(0)
        here = part[tuple(of[inside].to(part.device) for of in index)].reshape(-1)
        found.update(zip(at[inside].tolist(), here.to(torch.complex128).tolist(), strict=True))
    return found


def local_shape_of(name: str, spec: DTensorSpec) -> Shape:
    """Returns the shape of this rank's part of the tensor `name`, which lies as `spec` says."""
    if is_ragged(spec):
        return layout_of(spec).local_shape
    box = _cell_here(name, spec)
    return (0,) if box is None else box.sizes


def _cell_here(name: str, spec: DTensorSpec) -> Box | None:
    """Returns this rank's part of a tensor that is sharded as torch shards, or None if it is not in the mesh."""
    coordinate, everything = spec.mesh.get_coordinate(), whole(tuple(spec.shape))
    if coordinate is None:
        return None
    order = _order_of(name, spec)
    return cell(
        everything, [(_dim_of(spec.placements[axis]), spec.mesh.size(axis), coordinate[axis]) for axis in order]
    )


def _runs_here(spec: DTensorSpec, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    boxes = boxes_here(layout_of(spec))
    if len(boxes) == 1 and boxes[0][0].sizes == tuple(local.shape):
        return [(boxes[0][0], local)]  # its elements need not be in order
    return [(box, local.view(-1)[start : start + box.numel].view(box.sizes)) for box, start in boxes]


def grid_of(copies: Copies, copy: int) -> Grid:
    """Returns where the pieces of one copy are, over the files."""
    assert copies.cuts is not None, "its ranks do not list their pieces"
    return Grid(copies.firsts[copy], copies.cuts)


def _held(
    mesh: DeviceMesh, files: tuple[int, ...], copied: tuple[int, ...], cuts: tuple[GridCut, ...] | None
) -> Copies:
    """Returns the copies that the axes `copied` hold."""
    coordinate, own = mesh.get_coordinate(), None
    strides = [prod(mesh.shape[axis + 1 :]) for axis in range(mesh.ndim)]
    if coordinate is not None:
        own = 0
        for axis in copied:
            own = own * mesh.size(axis) + coordinate[axis]
    places = product(*(range(mesh.size(axis)) for axis in copied))
    firsts = [sum(at * strides[axis] for at, axis in zip(place, copied, strict=True)) for place in places]
    return Copies(files, tuple(files[first] for first in firsts), cuts, own)


def _cuts(spec: DTensorSpec, files: tuple[int, ...], order: tuple[int, ...]) -> tuple[GridCut, ...] | None:
    """Returns the cuts of a copy, or None if the files are not evenly spaced along the axes of the mesh."""
    sizes = tuple(spec.mesh.shape)
    strides = [files[prod(sizes[axis + 1 :])] - files[0] if sizes[axis] > 1 else 0 for axis in range(len(sizes))]
    spaced = tuple(
        files[0] + sum(at * stride for at, stride in zip(place, strides, strict=True))
        for place in product(*map(range, sizes))
    )
    if spaced != files or min(strides) < 0:
        return None
    return tuple(GridCut(_dim_of(spec.placements[axis]), sizes[axis], strides[axis]) for axis in order)


def _order_of(name: str, spec: DTensorSpec) -> tuple[int, ...]:
    """Returns the mesh axes that shard a dim, in the order in which they cut. Raises CheckpointError if none can."""
    order = _order(tuple(spec.placements), tuple(spec.mesh.shape))
    if order is None:
        raise CheckpointError(
            f"{name} has the placements {spec.placements} on {spec.mesh}, and a checkpoint holds what is replicated or "
            "sharded; reduce what is partial"
        )
    return order


def _dim_of(placement: Placement) -> int:
    dim: int = placement.dim  # type: ignore[attr-defined]  # it is a shard, strided or not
    return dim


@lru_cache(maxsize=1024)
def _order(placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes that shard a dim, in the order in which they cut it: from left to right, but an axis with a
    strided shard after those to its right whose sizes make up its split factor. None if there is no such order."""
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) or split_factor_of(placement) is not None:
            by_dim.setdefault(_dim_of(placement), []).append(axis)
        elif not placement.is_replicate():
            return None
    found: list[int] = []
    for axes in by_dim.values():
        order = next((order for order in permutations(axes) if _makes(order, placements, sizes)), None)
        if order is None:
            return None
        found += order
    return tuple(found)


def _makes(order: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> bool:
    """Returns whether cutting in this order gives the axes the split factors that they have."""
    return all(
        prod(sizes[other] for other in order[:at] if other > axis) == (split_factor_of(placements[axis]) or 1)
        for at, axis in enumerate(order)
    )
