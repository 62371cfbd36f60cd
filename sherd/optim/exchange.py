"""How matrices whose elements are on several ranks travel to their owners, and their updates to the shards.

    rank 0  | w1 rows 0-1 | w2 rows 0-1 |   to owners    rank 0 (owner of w1)  | w1 rows 0-3 |
    rank 1  | w1 rows 2-3 | w2 rows 2-3 |   --------->   rank 1 (owner of w2)  | w2 rows 0-3 |
                                           from owners
                                           <-----------

One all-to-all to the owners and one from them for all matrices of a bucket, packed without padding. Where shards are
replicated, the replicas divide the matrices: an owner receives from the ranks of its own replica, and sends to all
ranks. Where tensor parallelism cuts a matrix, the part of each tensor-parallel rank is assembled before the matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise, permutations
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_beside
from sherd.comm.mesh import DataMesh
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Cut
from sherd.optim.faults import HEADER, StepFaults, header_of
from sherd.optim.owners import MatrixWork, in_order, owners_of

Batch = tuple[int, int, int]
"""How many matrices, and the rows and columns of each."""


def work_of(batch: Batch) -> float:
    """Returns the work of a function of full matrices, up to a factor: that of an iteration of Newton-Schulz."""
    number, *sides = batch
    less, more = sorted(sides)
    return number * less * less * (2 * more + less)


@dataclass(frozen=True)
class TensorAxis:
    """The axis of tensor parallelism that cuts a parameter's `dim`.

    Attributes:
        mesh: a mesh of this axis and of those of data parallelism.
        axis: its number in the mesh.
        dim: the dim of the parameter.
    """

    mesh: DeviceMesh
    axis: int
    dim: int

    @property
    def own(self) -> int:
        return self.mesh.get_local_rank(self.axis)

    def line_of(self, rank: int) -> list[int]:
        """Returns the ranks that differ from `rank` in this coordinate alone, in its order."""
        at: list[int] = (self.mesh.mesh == rank).nonzero()[0].tolist()
        line: list[int] = self.mesh.mesh.movedim(self.axis, -1)[tuple(at[: self.axis] + at[self.axis + 1 :])].tolist()
        return line


Holder = tuple[int, int]
"""The part of a parameter that a rank holds: the numbers of its tensor-parallel part (0 without one) and its shard."""


class Ring:
    """The ranks that hold the shards of some parameters, numbered by part, then by shard, then by replica.

    `rank` is this rank's number. `holders[number]` says which shard of each parameter a rank holds.
    """

    def __init__(self, mesh: DataMesh, across: TensorAxis | None = None) -> None:
        self.mesh = mesh
        self.num_replicas = mesh.num_replicas
        self._group: dist.ProcessGroup | None = None
        ranks = [rank for copies in mesh.copies_of_shards() for rank in copies]
        # With tensor parallelism a data-parallel rank stands for the line of ranks that hold its parts.
        lines = [[rank] if across is None else across.line_of(rank) for rank in ranks]
        self.ranks = [rank for part in zip(*lines, strict=True) for rank in part]
        own = 0 if across is None else across.own
        self.rank = own * len(ranks) + mesh.shard_rank * mesh.num_replicas + mesh.replica
        self.holders: tuple[Holder, ...] = tuple(
            (part, mesh.pieces_of(shard)[replica if mesh.shards_replicas else 0])
            for part in range(len(lines[0]))
            for shard in range(mesh.num_shards)
            for replica in range(mesh.num_replicas)
        )

    def axes_of(self, mesh: DeviceMesh) -> list[int]:
        """Returns the axes of a mesh that the ranks of this ring span, the slowest first as the ring numbers them."""
        ranks, at = mesh.mesh, mesh.get_coordinate()
        assert at is not None, "a rank steps what it holds"
        other_coordinates = [tuple(at[:axis] + at[axis + 1 :]) for axis in range(mesh.ndim)]
        lines = [ranks.movedim(axis, -1)[others].tolist() for axis, others in enumerate(other_coordinates)]
        axes = [axis for axis, line in enumerate(lines) if not set(line) - set(self.ranks)]
        own = ranks[tuple(slice(None) if axis in axes else number for axis, number in enumerate(at))]
        # The mesh may have its axes in another order than the ring.
        order = next(
            each for each in permutations(range(len(axes))) if own.permute(each).flatten().tolist() == self.ranks
        )
        return [axes[number] for number in order]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all these ranks. All of them ask for it at the same moment when they do so first."""
        # No cached property: up to Python 3.11 it lets one thread in at a time, and ranks may be threads.
        if self._group is None:
            all_ranks = default_group()
            known = (self.mesh.shard_group, self.mesh.replicate_group, all_ranks)
            same = [group for group in known if group is not None and group.size() == len(self.ranks)]
            self._group = same[0] if same else group_beside(all_ranks, "matrices", sorted(self.ranks), self.mesh.device)
        return self._group

    @cached_property
    def order(self) -> list[int]:
        return [self.ranks.index(rank) for rank in dist.get_process_group_ranks(self.group)]

    def senders(self, owner: int) -> list[int]:
        """Returns the numbers of the ranks that send their shards to `owner`, each shard once."""
        if self.mesh.shards_replicas:
            return list(range(len(self.ranks)))
        # Replicas have the same shards, so those of the owner's replica are enough.
        return list(range(owner % self.num_replicas, len(self.ranks), self.num_replicas))


@dataclass(frozen=True)
class Part:
    """The part of some matrices on one tensor-parallel rank; all of them without tensor parallelism.

    Attributes:
        cuts: how data parallelism cuts the gradient of the rank's tensor, and the tensor, which receives `updates`.
        elements: the elements of this tensor, flattened, that belong to the matrices.
        shape: their shape, as a batch.
    """

    cuts: tuple[Cut, Cut]
    elements: Extent
    shape: Batch

    def held(self, shard: int, updates: bool = False) -> Extent:
        """Returns the elements of a shard's flattened gradient, or tensor, that belong to the matrices."""
        cut = self.cuts[updates]
        if cut.view[0] > 1:
            return Extent(0, cut.local_numel(shard))
        run = run_of(cut, shard)
        return run.intersect(self.elements).shifted(-run.start)

    def place(self, shard: int, updates: bool) -> ShardRows:
        """Returns where a shard's elements are in this part."""
        cut = self.cuts[updates]
        if cut.view[0] > 1:
            return ShardRows(cut.view, cut.piece(shard))
        part = run_of(cut, shard).intersect(self.elements)
        return ShardRows((1, self.elements.numel, 1), part.shifted(-self.elements.start))


@dataclass(frozen=True, eq=False)
class MatrixItem:
    """Full matrices of one parameter that one rank computes. Two items are equal if they are one object.

    Attributes:
        index: the number of the parameter among those that are stepped.
        batch: the matrices.
        parts: what they are assembled from, next to each other.
        dim: the dim of the parts' shapes along which they are concatenated.
        owner: the number in the ring of the rank that computes them.
    """

    index: int
    batch: Batch
    parts: tuple[Part, ...]
    dim: int = 1
    owner: int = 0

    @property
    def numel(self) -> int:
        return prod(self.batch)

    @property
    def flops(self) -> float:
        return work_of(self.batch)

    def held(self, holder: Holder, updates: bool = False) -> Extent:
        return self.parts[holder[0]].held(holder[1], updates)

    def has_all(self, holder: Holder) -> bool:
        return self.held(holder).numel == self.numel

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the matrices of their parts, which are 1-D."""
        if len(parts) == 1:
            return parts[0].view(self.batch)
        shaped = [each.view(part.shape) for each, part in zip(parts, self.parts, strict=True)]
        return torch.cat(shaped, self.dim).view(self.batch)

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of matrices, 1-D."""
        if len(self.parts) == 1:
            return [full.reshape(-1)]
        sizes = [part.shape[self.dim] for part in self.parts]
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(sizes)
        return [each.reshape(-1) for each in full.reshape(shape).split(sizes, self.dim)]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Some elements of flattened matrices: `rows` of `view`."""

    view: tuple[int, int, int]
    rows: Extent

    @property
    def numel(self) -> int:
        return self.view[0] * self.rows.numel * self.view[2]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the view of these rows in `full`, 1-D."""
        return full.view(self.view).narrow(1, self.rows.start, self.rows.numel)


# Ranks may be thousands, and equal blocks are cut alike.
@functools.lru_cache(256)
def numels_of(parts: tuple[Part, ...], holders: tuple[Holder, ...]) -> list[list[int]]:
    """Returns how many elements each holder has of the gradients of some matrices, and of the matrices themselves."""
    return [[parts[at].held(shard, updates).numel for at, shard in holders] for updates in (False, True)]


@functools.lru_cache(256)
def _borders(cut: Cut) -> frozenset[int]:
    runs = [run_of(cut, shard) for shard in range(cut.num_ranks)]
    return frozenset(end for run in runs for end in (run.start, run.stop))


def run_of(cut: Cut, shard: int) -> Extent:
    """Returns the elements of a flattened tensor that are in a shard, of a cut whose shards are contiguous ranges."""
    rows, inner = cut.piece(shard), cut.view[2]
    return Extent(rows.start * inner, rows.numel * inner)


def items_of(index: int, batch: Batch, cuts: tuple[Cut, Cut], one_by_one: bool) -> list[MatrixItem]:
    """Returns the items of a parameter: matrices that are complete on one rank are items apart from cut ones.

    Args:
        index: the number of the parameter.
        batch: how many matrices it consists of, one after the other, and their sizes.
        cuts: how its gradient is cut, and how it is cut itself.
        one_by_one: each matrix is an item.
    """
    number, rows, columns = batch
    size = rows * columns
    if not size:
        return []
    borders = {0, number} | set(range(number if one_by_one else 0))
    for end in _borders(cuts[0]) if all(cut.view[0] == 1 for cut in cuts) else ():
        borders |= {end // size, -(-end // size)}  # the last matrix of a run may be shared with its neighbour
    items = []
    for first, last in pairwise(sorted(borders)):
        some, elements = (last - first, rows, columns), Extent(first * size, (last - first) * size)
        items.append(MatrixItem(index, some, (Part(cuts, elements, some),)))
    return items


def joined_items_of(index: int, batch: Batch, cuts: Sequence[Cut], dim: int, num_items: int) -> list[MatrixItem]:
    """Returns the items of a parameter whose `dim` tensor parallelism cuts, in each of its matrices.

    Args:
        index: the number of the parameter.
        batch: the matrices of the full parameter.
        cuts: how the parts are cut, each over the ranks of data parallelism.
        dim: the dim of the parameter.
        num_items: how many items there are at most; the matrices are divided among them.
    """
    if not prod(batch):
        return []
    shapes = [each.shape if len(each.shape) == 3 else (1, each.shape[0], prod(each.shape[1:])) for each in cuts]
    number = shapes[0][0]
    items = []
    for some in chunks(number, num_items if all(each.view[0] == 1 for each in cuts) else 1):
        parts = [
            Part(
                (cut, cut),
                Extent(some.start * rows * columns, some.numel * rows * columns),
                (some.numel, rows, columns),
            )
            for cut, (_, rows, columns) in zip(cuts, shapes, strict=True)
        ]
        if some.numel:
            # A part of 2 dims is a batch of one matrix, which moves the dim by one.
            matrices = some.numel * (batch[0] // number), batch[1], batch[2]
            items.append(MatrixItem(index, matrices, tuple(parts), dim if len(cuts[0].shape) == 3 else dim + 1))
    return items


def with_owners(items: Sequence[MatrixItem], ring: Ring, flops: Mapping[int, float]) -> list[MatrixItem]:
    """Returns the items with their owners, all ranks of the ring the same.

    An item of whose gradient ranks hold all is computed by one of these ranks, any other item by any rank. A rank that
    has much in `flops`, computed in addition, gets less. The owners of one parameter's items are in order, so that what
    they keep for these is in runs.
    """
    works, ranks = [], range(len(ring.ranks))
    for item in items:
        numels, _ = numels_of(item.parts, ring.holders)
        holders = [rank for rank in ranks if numels[rank] == item.numel]
        works.append(MatrixWork(item.flops, item.numel, holders or ranks))
    owners = owners_of(works, len(ranks), [flops.get(rank, 0.0) for rank in ring.ranks])
    for _, of_parameter in groupby(range(len(items)), key=lambda number: items[number].index):
        first, *others = of_parameter
        own = slice(first, first + 1 + len(others))
        owners[own] = in_order(owners[own], works[own], len(ranks))
    return [replace(item, owner=owner) for item, owner in zip(items, owners, strict=True)]


Sizes = tuple[list[int], list[list[int]]]
"""How many elements each rank of the ring is sent, and how many are received from it, part by part."""

Lines = Sequence[Sequence[tuple[int, Extent] | tuple[int, int, ShardRows]]]


def _sizes(sent: Lines, received: Lines) -> Sizes:
    numels = [[[HEADER, *(part[-1].numel for part in line)] for line in lines] for lines in (sent, received)]
    return [sum(line) for line in numels[0]], numels[1]


Local = dict[int, torch.Tensor]
"""The directions on this rank, 1-D, by the numbers of their parameters."""


class Bucket:
    """Items that are exchanged together, to their owners and from them, on all ranks the same and in the same order.

    Their parameters have one dtype, and shards that may rest in host memory. Gradients of items that are `at_owners` do
    not travel.
    """

    def __init__(self, items: Sequence[MatrixItem], ring: Ring, dtype: torch.dtype) -> None:
        self.ring, self.dtype, self.device = ring, dtype, ring.mesh.device
        self.own = [item for item in items if item.owner == ring.rank]
        self.local: list[tuple[MatrixItem, Extent]] = []
        """Items that this rank has complete, computed together with those of the bucket."""
        self.at_owners = all(item.has_all(ring.holders[item.owner]) for item in items)
        self._header = torch.empty(0)
        self._missing: list[int] | None = None
        at, shard = holder = ring.holders[ring.rank]
        self._numels = {item.index: item.parts[at].cuts[0].local_numel(shard) for item in items}
        of_rank = [[item for item in items if item.owner == rank] for rank in range(len(ring.ranks))]

        def held(updates: bool) -> list[list[tuple[int, Extent]]]:
            """Returns the elements of local tensors that belong to the items of each rank."""
            return [
                [
                    (item.index, part)
                    for item in line
                    if (updates or self._sends(ring.rank, item)) and (part := item.held(holder, updates)).numel
                ]
                for line in of_rank
            ]

        def places(updates: bool) -> list[list[tuple[int, int, ShardRows]]]:
            """Returns the own items of which each rank has a shard: number, part, and the shard's place in it."""
            return [
                [
                    (number, at, item.parts[at].place(shard, updates))
                    for number, item in enumerate(self.own)
                    if (updates or self._sends(rank, item)) and item.held((at, shard), updates).numel
                ]
                for rank, (at, shard) in enumerate(ring.holders)
            ]

        self._sent, received = held(updates=False), places(updates=False)
        updated, self._sent_updates = held(updates=True), places(updates=True)
        self._received, self._updated = list(chain.from_iterable(received)), list(chain.from_iterable(updated))
        self._sizes_to_owners = _sizes(self._sent, received)
        self._sizes_from_owners = _sizes(self._sent_updates, updated)

    def _sends(self, rank: int, item: MatrixItem) -> bool:
        """Returns whether a rank, if it holds a shard of the gradient of `item`, sends that shard to the owner."""
        if item.has_all(self.ring.holders[item.owner]):
            return rank == item.owner
        return rank in self.ring.senders(item.owner)

    def to_owners(
        self, directions: Mapping[int, torch.Tensor], wire: torch.dtype, faults: StepFaults
    ) -> Moving | Local:
        """Start to send the directions in the dtype `wire`, unless they are at their owners.

        Those without a gradient are zeros, so that sizes are the same in each step.
        """
        # The header is made again only where it differs: it goes to the device.
        missing = [*(index for index in self._numels if index not in directions), *faults.missing_others]
        if missing != self._missing or self._header.dtype != wire:
            self._missing = missing
            self._header = torch.tensor(header_of(missing), dtype=wire, device=self.device)
        local = {
            index: directions[index].to(self.device)
            if index in directions
            else torch.zeros(numel, dtype=wire, device=self.device)
            for index, numel in self._numels.items()
        }
        if self.at_owners:
            return local
        header, parts = faults.header(self._header), list[torch.Tensor]()
        for line in self._sent:
            parts.append(header)
            parts += [local[index][part.start : part.stop] for index, part in line]
        return self._start(parts, self._sizes_to_owners, header)

    def full(self, sent: Moving | Local) -> tuple[dict[MatrixItem, torch.Tensor], torch.Tensor]:
        """Returns the own items, each [number, rows, columns], and the headers of ranks that sent gradients, if any."""
        if not isinstance(sent, Moving):
            holder = self.ring.holders[self.ring.rank]
            held = [(item, item.held(holder)) for item in self.own]
            full = {item: sent[item.index][part.start : part.stop].view(item.batch) for item, part in held}
            return full, torch.empty(0)
        headers, shards = sent.wait()
        parts = [[sent.buffer.new_empty(part.elements.numel) for part in item.parts] for item in self.own]
        if shards:
            places = [place.of(parts[number][part]) for number, part, place in self._received]
            torch._foreach_copy_(places, [p.view(place.shape) for p, place in zip(shards, places, strict=True)])
        return {item: item.joined(each) for item, each in zip(self.own, parts, strict=True)}, headers

    def from_owners(self, updates: Mapping[MatrixItem, torch.Tensor], faults: StepFaults) -> Moving:
        """Start to send the shards of `updates`, of all own items, to their holders."""
        flat = [item.split(updates[item]) for item in self.own]
        header, parts = faults.header(self._header), list[torch.Tensor]()
        for line in self._sent_updates:
            parts.append(header)
            parts += [place.of(flat[number][part]).reshape(-1) for number, part, place in line]
        return self._start(parts, self._sizes_from_owners, header)

    def arrived(self, moving: Moving) -> tuple[list[tuple[int, Extent, torch.Tensor]], torch.Tensor]:
        """Returns numbers of parameters, elements of their local tensors, and these updates; and all ranks' headers."""
        headers, shards = moving.wait()
        updated = zip(self._updated, shards, strict=True)
        return [(index, held, update) for (index, held), update in updated], headers

    def _start(self, parts: Sequence[torch.Tensor], sizes: Sizes, like: torch.Tensor) -> Moving:
        """Start the all-to-all: `parts`, concatenated, of which each rank gets as many elements as `sizes` say."""
        group, order, dtype = self.ring.group, self.ring.order, like.dtype
        sent, numels = sizes
        line = torch.cat([p if p.dtype == dtype else p.to(dtype) for p in parts])
        if order != sorted(order):  # the all-to-all goes by the group's numbers of the ranks, not by the ring's
            by_rank = line.split(sent)
            line = torch.cat([by_rank[number] for number in order])
        received = [sum(numels[number]) for number in order]
        buffer = line.new_empty(sum(received))
        with named("the exchange of matrices", group):
            sent = [sent[number] for number in order]
            work = dist.all_to_all_single(buffer, line, received, sent, group=group, async_op=True)
        return Moving(work, line, buffer, numels, order, group)


@dataclass
class Moving:
    """An all-to-all under way. `line`, what is sent, is held until it has ended."""

    work: dist.Work | None
    line: torch.Tensor
    buffer: torch.Tensor
    numels: list[list[int]]
    order: list[int]
    group: dist.ProcessGroup

    def wait(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the headers, [ranks of the ring, HEADER], and the parts after them, each 1-D."""
        if self.work is not None:
            with named("the exchange of matrices", self.group):
                self.work.wait()
        parts = iter(self.buffer.split([numel for number in self.order for numel in self.numels[number]]))
        by_number = {number: [next(parts) for _ in self.numels[number]] for number in self.order}
        lines = [by_number[number] for number in range(len(self.order))]
        return torch.stack([line[0] for line in lines]), [part for line in lines for part in line[1:]]
