"""The parts of a tensor that ranks hold, and which rank writes which part.

Every rank derives from the layouts of its tensors which file the parts of all ranks go to; ranks exchange nothing.
Each part is written once, and each rank writes about as many bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import prod

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, local_tensor, spec_of, split_factor_of
from sherd.checkpoint.encoding import dtype_name
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, GridCut, cell, whole
from sherd.layout.placement import Shape
from sherd.storage.manifest import nbytes_of
from sherd.tensor.placement import is_ragged, layout_of
from sherd.tensor.ragged import boxes_here

SMALL_BYTES = 1 << 20
"""The first rank that has plain tensors below this size writes all of them.

Ranks may have different ones, as of a batch norm, and the mean of one rank does not go with the variance of another.
"""


# The layouts of tensors


@dataclass(frozen=True, slots=True)
class MeshCopies:
    """The copies of a tensor of certain placements that a mesh holds.

    Args:
        files: the files of the mesh's ranks, by which ranks recognise each other's mesh.
        firsts: the file of the first part of each copy.
        cuts: how a copy is cut. None: each rank lists its own parts.
        own: the copy that this rank has a part of. None: this rank is not in the mesh.
    """

    files: tuple[int, ...]
    firsts: tuple[int, ...]
    cuts: tuple[GridCut, ...] | None
    own: int | None


@dataclass(frozen=True)
class Described:
    """A tensor that is saved, as one rank sees it.

    `copies` is None if each rank has the full tensor: a plain tensor, or one without elements.
    """

    dtype: str
    shape: Shape
    copies: MeshCopies | None

    @cached_property
    def variant(self) -> tuple[object, ...]:
        """The key that two ranks share if they hold parts, or copies, of one tensor."""
        of_mesh = (self.copies.files, self.copies.firsts, self.copies.cuts) if self.copies else None
        return self.dtype, self.shape, of_mesh


class Layouts:
    """The layouts of the tensors of one save, each computed once.

    `ranks` are the ranks that save. Each writes a file, whose number is the rank's place among them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: number for number, rank in enumerate(ranks)}
        self._known: dict[tuple[object, ...], MeshCopies] = {}

    def described(self, name: str, tensor: torch.Tensor) -> Described:
        """Returns the description of `tensor`, which is called `name`.

        Raises:
            CheckpointError: files do not have its dtype or layout.
        """
        copies = self._copies(name, spec_of(tensor)) if isinstance(tensor, DTensor) and tensor.numel() else None
        return Described(dtype_name(tensor.dtype, name), tuple(tensor.shape), copies)

    def _copies(self, name: str, spec: DTensorSpec) -> MeshCopies:
        is_of_runs, mesh = is_ragged(spec), spec.mesh
        key = (mesh, is_of_runs, layout_of(spec).copied_axes if is_of_runs else tuple(spec.placements))
        if key in self._known:
            return self._known[key]
        ranks = mesh.mesh.flatten().tolist()  # the last axis fastest
        if absent := [rank for rank in ranks if rank not in self._files]:
            raise CheckpointError(f"{name} is on ranks {absent[:8]}, too, which do not save; leave out the group")
        files = tuple(self._files[rank] for rank in ranks)
        cuts: tuple[GridCut, ...] | None = None
        if is_of_runs:
            copied = layout_of(spec).copied_axes
        else:
            order = _order_of(name, spec)
            copied = tuple(axis for axis in range(mesh.ndim) if axis not in order)
            cuts = _cuts(spec, files, order)
        own: int | None = None
        if (coordinate := mesh.get_coordinate()) is not None:
            own = 0
            for axis in copied:
                own = own * mesh.size(axis) + coordinate[axis]
        strides = [prod(mesh.shape[axis + 1 :]) for axis in range(mesh.ndim)]
        coordinates = product(*(range(mesh.size(axis)) for axis in copied))
        firsts = [sum(at * strides[axis] for at, axis in zip(place, copied, strict=True)) for place in coordinates]
        self._known[key] = MeshCopies(files, tuple(files[first] for first in firsts), cuts, own)
        return self._known[key]


# This rank's parts


def pieces_here(name: str, tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Returns this rank's parts of `tensor`, each with its memory.

    A plain tensor is one part, and so is a tensor without elements.
    """
    if not tensor.numel():
        return [(whole(tuple(tensor.shape)), torch.empty(tensor.shape, dtype=tensor.dtype))]
    if not isinstance(tensor, DTensor):
        return [(whole(tuple(tensor.shape)), tensor.detach())]
    spec, local = spec_of(tensor), local_tensor(tensor).detach()
    if is_ragged(spec):
        boxes = boxes_here(layout_of(spec))
        if len(boxes) == 1 and boxes[0][0].sizes == tuple(local.shape):
            return [(boxes[0][0], local)]  # as it is: its elements need not be in order, so no view may flatten it
        return [(box, local.view(-1)[start : start + box.numel].view(box.sizes)) for box, start in boxes]
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
    """Returns this rank's elements among some 64 that are spread over `tensor`, by their number in it."""
    sample: dict[int, complex] = {}
    at = torch.arange(0, tensor.numel(), max(tensor.numel() // 64, 1))
    for box, part in pieces_here(name, tensor):
        index = [of - first for of, first in zip(torch.unravel_index(at, tensor.shape), box.offsets, strict=True)]
        within = [(of >= 0) & (of < size) for of, size in zip(index, box.sizes, strict=True)]
        inside = torch.stack([torch.ones_like(at, dtype=torch.bool), *within]).all(0)
        found = part[tuple(of[inside].to(part.device) for of in index)].reshape(-1)
        sample.update(zip(at[inside].tolist(), found.to(torch.complex128).tolist(), strict=True))
    return sample


def local_shape_of(name: str, spec: DTensorSpec) -> Shape:
    if is_ragged(spec):
        return layout_of(spec).local_shape
    box = _cell_here(name, spec)
    return (0,) if box is None else box.sizes


def _cell_here(name: str, spec: DTensorSpec) -> Box | None:
    """Returns this rank's part of a tensor that is sharded as torch shards; None if the rank is not in the mesh."""
    coordinate, everything = spec.mesh.get_coordinate(), whole(tuple(spec.shape))
    if coordinate is None:
        return None
    order = _order_of(name, spec)
    return cell(
        everything, [(_dim_of(spec.placements[axis]), spec.mesh.size(axis), coordinate[axis]) for axis in order]
    )


# The cuts of a copy


def _cuts(spec: DTensorSpec, files: tuple[int, ...], order: tuple[int, ...]) -> tuple[GridCut, ...] | None:
    """Returns the cuts of a copy; None if the files are not evenly spaced along the axes of the mesh."""
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
    """Returns the mesh axes that shard a dim, in the order in which they cut. Raises CheckpointError if none exists."""
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
    """Returns the axes that shard a dim, in the order in which they cut it; None if no order fits.

    Axes cut from left to right. But an axis with a strided shard cuts after the axes to its right whose sizes make up
    its split factor.
    """
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) or split_factor_of(placement) is not None:
            by_dim.setdefault(_dim_of(placement), []).append(axis)
        elif not placement.is_replicate():
            return None
    ordered: list[int] = []
    for axes in by_dim.values():
        order = next((order for order in permutations(axes) if _fits(order, placements, sizes)), None)
        if order is None:
            return None
        ordered += order
    return tuple(ordered)


def _fits(order: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> bool:
    """Returns True if cutting in this order gives the axes the split factors that they have."""
    return all(
        prod(sizes[other] for other in order[:at] if other > axis) == (split_factor_of(placements[axis]) or 1)
        for at, axis in enumerate(order)
    )


# The choice of copies


@dataclass(frozen=True, slots=True)
class Choice:
    """The copy of a tensor that is written: the `variant` that some ranks have, and the number of its `copy`.

    The copy of a plain tensor is a rank.
    """

    variant: tuple[object, ...]
    copy: int


@dataclass(frozen=True, slots=True)
class Party:
    """Ranks that have the same tensors, as they describe them."""

    ranks: tuple[int, ...]
    tensors: Mapping[str, Described]


def choose(parties: Sequence[Party]) -> dict[str, Choice]:
    """Returns the choice for each tensor, in the order of its first party.

    Parties may describe a tensor in different ways: two tensor-parallel ranks each shard a norm over their own
    data-parallel ranks. Then the first party's way is written. Copies go to the ranks with the fewest bytes so far. All
    ranks that know the same parties make the same choices.
    """
    choices: dict[str, Choice] = {}
    of_copies: dict[tuple[int, ...], list[int]] = {}
    of_ranks = {party.ranks: [(0, rank) for rank in party.ranks] for party in parties}
    for party in parties:
        for name, tensor in party.tensors.items():
            if name in choices:
                continue
            nbytes = nbytes_of(tensor.dtype, tensor.shape)
            if tensor.copies is None and nbytes < SMALL_BYTES:
                copy = party.ranks[0]
            elif tensor.copies is None:
                load, copy = of_ranks[party.ranks][0]
                heapq.heapreplace(of_ranks[party.ranks], (load + nbytes, copy))
            else:
                firsts = tensor.copies.firsts
                loads = of_copies.setdefault(firsts, [0] * len(firsts))
                copy = loads.index(min(loads))
                loads[copy] += nbytes * len(firsts) // len(tensor.copies.files)
            choices[name] = Choice(tensor.variant, copy)
    return choices


def is_written_here(tensor: Described, choice: Choice, rank: int) -> bool:
    if tensor.variant != choice.variant:
        return False
    return choice.copy == (rank if tensor.copies is None else tensor.copies.own)
