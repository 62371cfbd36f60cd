"""How matrices whose elements lie on several ranks travel to their owners, and what is computed of them back.

    rank 0  | w1 rows 0-1 | w2 rows 0-1 |     there    rank 0 (owner of w1)  | w1 rows 0-3 |
    rank 1  | w1 rows 2-3 | w2 rows 2-3 |    ------>   rank 1 (owner of w2)  | w2 rows 0-3 |
                                              back
                                             <------

One all-to-all there and one back for all matrices of a bucket, packed without padding. Where shards are replicated, the
replicas divide the matrices: an owner receives from the ranks of its own replica, and sends to the ranks of all. Where
tensor parallelism cuts a matrix first, its part on each rank is put together so, and then the parts are.
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
    """Returns the work of a function of whole matrices, up to a factor: that of an iteration of Newton-Schulz."""
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

    def beside(self, rank: int) -> list[int]:
        """Returns the ranks that differ from `rank` in this coordinate alone, in its order."""
        at: list[int] = (self.mesh.mesh == rank).nonzero()[0].tolist()
        line: list[int] = self.mesh.mesh.movedim(self.axis, -1)[tuple(at[: self.axis] + at[self.axis + 1 :])].tolist()
        return line


Holder = tuple[int, int]
"""What a rank holds of parameters: the part that tensor parallelism leaves to it, 0 without, and its piece of that."""


class Ring:
    """The ranks that hold the pieces of some parameters, numbered by part, then by shard, then by replica.

    `rank` is this rank's number. `holders[number]` says which piece of each parameter a rank holds.
    """

    def __init__(self, mesh: DataMesh, across: TensorAxis | None = None) -> None:
        self.mesh = mesh
        self.num_replicas = mesh.num_replicas
        self._group: dist.ProcessGroup | None = None
        ranks = [rank for copies in mesh.copies_of_shards() for rank in copies]
        lines = [[rank] if across is None else across.beside(rank) for rank in ranks]
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
        """Returns the axes of a mesh whose ranks these are, the slowest first as they are numbered here."""
        ranks, at = mesh.mesh, mesh.get_coordinate()
        assert at is not None, "a rank steps what it holds"
        beside = [tuple(at[:axis] + at[axis + 1 :]) for axis in range(mesh.ndim)]
        lines = [ranks.movedim(axis, -1)[others].tolist() for axis, others in enumerate(beside)]
        axes = [axis for axis, line in enumerate(lines) if not set(line) - set(self.ranks)]
        own = ranks[tuple(slice(None) if axis in axes else number for axis, number in enumerate(at))]
        order = next(
            each for each in permutations(range(len(axes))) if own.permute(each).flatten().tolist() == self.ranks
        )
        return [axes[number] for number in order]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all these ranks. All of them ask for it at the same moment when they do so first."""
        # No cached property: up to Python 3.11 it lets one thread in at a time, and ranks may be threads.
        if self._group is None:
            everybody = default_group()
            known = (self.mesh.shard_group, self.mesh.replicate_group, everybody)
            same = [group for group in known if group is not None and group.size() == len(self.ranks)]
            self._group = same[0] if same else group_beside(everybody, "matrices", sorted(self.ranks), self.mesh.device)
        return self._group

    @cached_property
    def order(self) -> list[int]:
        return [self.ranks.index(rank) for rank in dist.get_process_group_ranks(self.group)]

    def senders(self, owner: int) -> list[int]:
        """Returns the numbers of the ranks that send their pieces to `owner`, each piece once."""
        if self.mesh.shards_replicas:
            return list(range(len(self.ranks)))
        return list(range(owner % self.num_replicas, len(self.ranks), self.num_replicas))


@dataclass(frozen=True)
class Part:
    """The part of some matrices that tensor parallelism leaves to a rank; all of them without.

    Attributes:
        cuts: how data parallelism cuts the gradient of the rank's tensor, and the tensor, to which updates go `back`.
        elements: the elements of this tensor, flattened, that belong to the matrices.
        shape: their shape, as a batch.
    """

    cuts: tuple[Cut, Cut]
    elements: Extent
    shape: Batch

    def held(self, piece: int, back: bool = False) -> Extent:
        """Returns the elements of a piece's flattened gradient, or tensor, that belong to the matrices."""
        cut = self.cuts[back]
        if cut.view[0] > 1:
            return Extent(0, cut.local_numel(piece))
        run = run_of(cut, piece)
        return run.intersect(self.elements).shifted(-run.start)

    def place(self, piece: int, back: bool) -> PieceRows:
        """Returns where a piece's elements are in this part."""
        cut = self.cuts[back]
        if cut.view[0] > 1:
            return PieceRows(cut.view, cut.piece(piece))
        part = run_of(cut, piece).intersect(self.elements)
        return PieceRows((1, self.elements.numel, 1), part.shifted(-self.elements.start))


@dataclass(frozen=True, eq=False)
class MatrixItem:
    """Whole matrices of one parameter that one rank computes. Two items are equal if they are one object.

    Attributes:
        index: the number of the parameter among those that are stepped.
        batch: the matrices.
        parts: what they are put together of, beside one another.
        dim: the dim of the parts' shapes along which they are beside one another.
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

    def held(self, holder: Holder, back: bool = False) -> Extent:
        return self.parts[holder[0]].held(holder[1], back)

    def has_all(self, holder: Holder) -> bool:
        return self.held(holder).numel == self.numel

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the matrices of their parts, which are 1-D."""
        if len(parts) == 1:
            return parts[0].view(self.batch)
        shaped = [each.view(part.shape) for each, part in zip(parts, self.parts, strict=True)]
        return torch.cat(shaped, self.dim).view(self.batch)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of matrices, 1-D."""
        if len(self.parts) == 1:
            return [whole.reshape(-1)]
        sizes = [part.shape[self.dim] for part in self.parts]
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(sizes)
        return [each.reshape(-1) for each in whole.reshape(shape).split(sizes, self.dim)]


@dataclass(frozen=True, slots=True)
class PieceRows:
    """Some elements of flattened matrices: `rows` of `view`."""

    view: tuple[int, int, int]
    rows: Extent

    @property
    def numel(self) -> int:
        return self.view[0] * self.rows.numel * self.view[2]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the view of `whole`, 1-D, that this place is."""
        return whole.view(self.view).narrow(1, self.rows.start, self.rows.numel)


# Ranks may be thousands, and equal blocks are cut alike.
@functools.lru_cache(256)
def numels_of(parts: tuple[Part, ...], holders: tuple[Holder, ...]) -> list[list[int]]:
    """Returns how many elements of the gradients of some matrices each of the holders has, and of the matrices."""
    return [[parts[at].held(piece, back).numel for at, piece in holders] for back in (False, True)]


@functools.lru_cache(256)
def _borders(cut: Cut) -> frozenset[int]:
    runs = [run_of(cut, piece) for piece in range(cut.num_ranks)]
    return frozenset(end for run in runs for end in (run.start, run.stop))


def run_of(cut: Cut, piece: int) -> Extent:
    """Returns the elements of a flattened tensor that are in a piece, of a cut whose pieces are consecutive."""
    rows, inner = cut.piece(piece), cut.view[2]
    return Extent(rows.start * inner, rows.numel * inner)


def items_of(index: int, batch: Batch, cuts: tuple[Cut, Cut]) -> list[MatrixItem]:
    """Returns the items of a parameter: matrices that are whole on one rank apart from those that are cut.

    Args:
        index: the number of the parameter.
        batch: how it is made of matrices, one behind the other.
        cuts: how its gradient is cut, and how it is cut itself.
    """
    number, rows, columns = batch
    size = rows * columns
    if not size:
        return []
    borders = {0, number}
    for end in _borders(cuts[0]) if all(cut.view[0] == 1 for cut in cuts) else ():
        borders |= {end // size, -(-end // size)}  # the last matrix of a run may be shared with its neighbour
    items = []
    for first, last in pairwise(sorted(borders)):
        some, elements = (last - first, rows, columns), Extent(first * size, (last - first) * size)
        items.append(MatrixItem(index, some, (Part(cuts, elements, some),)))
    return items


def joined_items_of(index: int, batch: Batch, cuts: Sequence[Cut], dim: int, num_ranks: int) -> list[MatrixItem]:
    """Returns the items of a parameter whose `dim` tensor parallelism cuts, in each of its matrices.

    Args:
        index: the number of the parameter.
        batch: how the whole parameter is made of matrices.
        cuts: how the parts are cut, each over the ranks of data parallelism.
        dim: the dim of the parameter.
        num_ranks: how many ranks there are, to divide the matrices.
    """
    if not prod(batch):
        return []
    shapes = [each.shape if len(each.shape) == 3 else (1, each.shape[0], prod(each.shape[1:])) for each in cuts]
    number = shapes[0][0]
    items = []
    for some in chunks(number, num_ranks if all(each.view[0] == 1 for each in cuts) else 1):
        parts = [
            Part(
                (cut, cut),
                Extent(some.start * rows * columns, some.numel * rows * columns),
                (some.numel, rows, columns),
            )
            for cut, (_, rows, columns) in zip(cuts, shapes, strict=True)
        ]
        if some.numel:
            matrices = some.numel * (batch[0] // number), batch[1], batch[2]
            items.append(MatrixItem(index, matrices, tuple(parts), dim if len(cuts[0].shape) == 3 else dim + 1))
    return items


def with_owners(items: Sequence[MatrixItem], ring: Ring, flops: Mapping[int, float]) -> list[MatrixItem]:
    """Returns the items with their owners, all ranks of the ring the same.

    An item of whose gradient ranks hold all is computed by one of these ranks, any other item by any rank. A rank that
    has much in `flops`, computed besides, gets less. The owners of one parameter's items are in order, so that what
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

Lines = Sequence[Sequence[tuple[int, Extent] | tuple[int, int, PieceRows]]]


def _sizes(sent: Lines, received: Lines) -> Sizes:
    numels = [[[HEADER, *(part[-1].numel for part in line)] for line in lines] for lines in (sent, received)]
    return [sum(line) for line in numels[0]], numels[1]


Local = dict[int, torch.Tensor]
"""The directions on this rank, 1-D, by the numbers of their parameters."""


class Bucket:
    """Items that travel together: their way to their owners and back, the same, in one order, on all ranks.

    Their parameters have one dtype, and shards that may rest in host memory. Gradients of items that are `at_owners` do
    not travel.
    """

    def __init__(self, items: Sequence[MatrixItem], ring: Ring, dtype: torch.dtype) -> None:
        self.ring, self.dtype, self.device = ring, dtype, ring.mesh.device
        self.own = [item for item in items if item.owner == ring.rank]
        self.here: list[tuple[MatrixItem, Extent]] = []
        """Items that this rank computes by itself, together with those of the bucket."""
        self.at_owners = all(item.has_all(ring.holders[item.owner]) for item in items)
        self._header = torch.empty(0)
        self._missing: list[int] | None = None
        at, piece = holder = ring.holders[ring.rank]
        self._numels = {item.index: item.parts[at].cuts[0].local_numel(piece) for item in items}
        of_rank = [[item for item in items if item.owner == rank] for rank in range(len(ring.ranks))]

        def held(back: bool) -> list[list[tuple[int, Extent]]]:
            """Returns the elements of local tensors that belong to the items of each rank."""
            return [
                [
                    (item.index, part)
                    for item in line
                    if (back or self._sends(ring.rank, item)) and (part := item.held(holder, back)).numel
                ]
                for line in of_rank
            ]

        def places(back: bool) -> list[list[tuple[int, int, PieceRows]]]:
            """Returns the own items of which each rank has a piece, by number, and where it is, in which part."""
            return [
                [
                    (number, at, item.parts[at].place(piece, back))
                    for number, item in enumerate(self.own)
                    if (back or self._sends(rank, item)) and item.held((at, piece), back).numel
                ]
                for rank, (at, piece) in enumerate(ring.holders)
            ]

        self._sent, received = held(False), places(False)
        updated, self._sent_back = held(True), places(True)
        self._received, self._updated = list(chain.from_iterable(received)), list(chain.from_iterable(updated))
        self._there, self._back = _sizes(self._sent, received), _sizes(self._sent_back, updated)

    def _sends(self, rank: int, item: MatrixItem) -> bool:
        """Returns whether a rank, if it holds a piece of the gradient of `item`, sends that piece to the owner."""
        if item.has_all(self.ring.holders[item.owner]):
            return rank == item.owner
        return rank in self.ring.senders(item.owner)

    def there(self, directions: Mapping[int, torch.Tensor], wire: torch.dtype, faults: StepFaults) -> Moving | Local:
        """Start to send the directions in the dtype `wire`, unless they are at their owners.

        Those without a gradient are zeros, so that sizes are the same in each step.
        """
        missing = [*(index for index in self._numels if index not in directions), *faults.missing_besides]
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
        return self._start(parts, self._there, header)

    def whole(self, there: Moving | Local) -> tuple[dict[MatrixItem, torch.Tensor], torch.Tensor]:
        """Returns the own items, each [number, rows, columns], and the headers that came with gradients, if any."""
        if not isinstance(there, Moving):
            holder = self.ring.holders[self.ring.rank]
            held = [(item, item.held(holder)) for item in self.own]
            whole = {item: there[item.index][part.start : part.stop].view(item.batch) for item, part in held}
            return whole, torch.empty(0)
        headers, pieces = there.wait()
        parts = [[there.buffer.new_empty(part.elements.numel) for part in item.parts] for item in self.own]
        if pieces:
            places = [place.of(parts[number][part]) for number, part, place in self._received]
            torch._foreach_copy_(places, [p.view(place.shape) for p, place in zip(pieces, places, strict=True)])
        return {item: item.joined(each) for item, each in zip(self.own, parts, strict=True)}, headers

    def back(self, updates: Mapping[MatrixItem, torch.Tensor], faults: StepFaults) -> Moving:
        """Start to send the pieces of `updates`, of all own items, to their holders."""
        flat = [item.split(updates[item]) for item in self.own]
        header, parts = faults.header(self._header), list[torch.Tensor]()
        for line in self._sent_back:
            parts.append(header)
            parts += [place.of(flat[number][part]).reshape(-1) for number, part, place in line]
        return self._start(parts, self._back, header)

    def arrived(self, moving: Moving) -> tuple[list[tuple[int, Extent, torch.Tensor]], torch.Tensor]:
        """Returns numbers of parameters, elements of their local tensors, and these updates; and all ranks' headers."""
        headers, pieces = moving.wait()
        updated = zip(self._updated, pieces, strict=True)
        return [(index, held, update) for (index, held), update in updated], headers

    def _start(self, parts: Sequence[torch.Tensor], sizes: Sizes, like: torch.Tensor) -> Moving:
        """Start the all-to-all: `parts` behind one another, of which each rank gets as many elements as `sizes` say."""
        group, order, dtype = self.ring.group, self.ring.order, like.dtype
        sent, numels = sizes
        line = torch.cat([p if p.dtype == dtype else p.to(dtype) for p in parts])
        if order != sorted(order):
            pieces = line.split(sent)
            line = torch.cat([pieces[number] for number in order])
        received = [sum(numels[number]) for number in order]
        buffer = line.new_empty(sum(received))
        with named("the exchange of matrices", group):
            sent = [sent[number] for number in order]
            work = dist.all_to_all_single(buffer, line, received, sent, group=group, async_op=True)
        return Moving(work, line, buffer, numels, order, group)


@dataclass
class Moving:
    """An all-to-all under way. `line`, what is sent, lives until it has ended."""

    work: dist.Work | None
    line: torch.Tensor
    buffer: torch.Tensor
    numels: list[list[int]]
    order: list[int]
    group: dist.ProcessGroup

    def wait(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the header of each rank of the ring, one below the other, and the parts behind them, each 1-D."""
        if self.work is not None:
            with named("the exchange of matrices", self.group):
                self.work.wait()
        parts = iter(self.buffer.split([numel for number in self.order for numel in self.numels[number]]))
        by_number = {number: [next(parts) for _ in self.numels[number]] for number in self.order}
        lines = [by_number[number] for number in range(len(self.order))]
        return torch.stack([line[0] for line in lines]), [piece for line in lines for piece in line[1:]]
