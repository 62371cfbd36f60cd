"""How matrices whose elements lie on several ranks travel to their owners, and what is computed of them back.

    rank 0  | w1 rows 0-1 | w2 rows 0-1 |     there    rank 0 (owner of w1)  | w1 rows 0-3 |
    rank 1  | w1 rows 2-3 | w2 rows 2-3 |    ------>   rank 1 (owner of w2)  | w2 rows 0-3 |
                                              back
                                             <------

One all-to-all there and one back for all matrices of a bucket, packed without padding. Where shards are replicated, the
replicas divide the matrices: an owner receives from the ranks of its own replica, and sends to the ranks of all.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_beside
from sherd.comm.mesh import DataMesh
from sherd.layout.extent import Extent
from sherd.layout.placement import Cut, Shape
from sherd.optim.owners import MatrixWork, owners_of

Batch = tuple[int, int, int]
"""How many matrices, and the rows and columns of each."""


def work_of(batch: Batch) -> float:
    """Returns the work of a function of whole matrices, up to a factor: that of an iteration of Newton-Schulz."""
    number, *sides = batch
    less, more = sorted(sides)
    return number * less * less * (2 * more + less)


class Ring:
    """The ranks that hold the pieces of some parameters, numbered by shard and then by replica.

    `rank` is this rank's number. `piece_of[number]` is the piece of each parameter that a rank holds.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self.mesh = mesh
        self.num_replicas = mesh.num_replicas
        self.ranks = [rank for copies in mesh.copies_of_shards() for rank in copies]
        self.rank = mesh.shard_rank * mesh.num_replicas + mesh.replica
        self.piece_of = tuple(
            mesh.pieces_of(shard)[replica if mesh.shards_replicas else 0]
            for shard in range(mesh.num_shards)
            for replica in range(mesh.num_replicas)
        )

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The group of all these ranks. All of them ask for it at the same moment when they do so first."""
        everybody = default_group()
        for group in (self.mesh.shard_group, self.mesh.replicate_group, everybody):
            if group is not None and group.size() == len(self.ranks):
                return group
        return group_beside(everybody, "matrices", sorted(self.ranks), self.mesh.device)

    @cached_property
    def order(self) -> list[int]:
        """The numbers of the ranks, in the order of the group."""
        return [self.ranks.index(rank) for rank in dist.get_process_group_ranks(self.group)]

    def senders(self, owner: int) -> list[int]:
        """Returns the numbers of the ranks that send their pieces to `owner`, each piece once."""
        if self.mesh.shards_replicas:
            return list(range(len(self.ranks)))
        return list(range(owner % self.num_replicas, len(self.ranks), self.num_replicas))


@dataclass(frozen=True, eq=False)
class MatrixItem:
    """Whole matrices of one parameter that one rank computes. Two items are equal if they are one object.

    Attributes:
        index: the number of the parameter among those that are stepped.
        elements: the elements of the flattened parameter that the matrices are.
        batch: the matrices.
        cut: how the parameter's gradient is cut.
        update_cut: how the parameter is cut.
        owner: the number in the ring of the rank that computes them.
    """

    index: int
    elements: Extent
    batch: Batch
    cut: Cut
    update_cut: Cut
    owner: int = 0

    @property
    def flops(self) -> float:
        """`work_of` the matrices."""
        return work_of(self.batch)

    def held(self, cut: Cut, piece: int) -> Extent:
        """Returns the elements of a piece's flattened tensor, of one of the cuts, that belong to the matrices."""
        if cut.view[0] > 1:
            return Extent(0, cut.local_numel(piece))
        run = run_of(cut, piece)
        return run.intersect(self.elements).shifted(-run.start)

    def has_all(self, cut: Cut, piece: int) -> bool:
        """Returns whether a piece has all elements of the matrices."""
        return self.held(cut, piece).numel == self.elements.numel

    def place(self, cut: Cut, piece: int) -> PieceRows:
        """Returns where a piece's elements are in these matrices."""
        outer, size, inner = cut.view
        if outer > 1:
            rows = cut.piece(piece)
            return PieceRows((outer, size, inner), rows.start, rows.numel, outer * rows.numel * inner)
        part = run_of(cut, piece).intersect(self.elements).shifted(-self.elements.start)
        return PieceRows(None, part.start, part.numel, part.numel)


@dataclass(frozen=True, slots=True)
class PieceRows:
    """Some elements of flattened matrices: `length` rows from `start` on of `view`, or elements where that is None."""

    view: tuple[int, int, int] | None
    start: int
    length: int
    numel: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the view of `whole`, 1-D, that this place is."""
        if self.view is None:
            return whole.narrow(0, self.start, self.length)
        return whole.view(self.view).narrow(1, self.start, self.length)


@functools.lru_cache(256)  # ranks may be thousands, and equal blocks are cut alike
def numels_of(cut: Cut, elements: Extent, pieces: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many of some elements of a flattened tensor each of its pieces holds."""
    item = MatrixItem(0, elements, (1, 1, elements.numel), cut, cut)
    return tuple(item.held(cut, piece).numel for piece in pieces)


def run_of(cut: Cut, piece: int) -> Extent:
    """Returns the elements of a flattened tensor that are in a piece, of a cut whose pieces are consecutive."""
    rows, inner = cut.piece(piece), cut.view[2]
    return Extent(rows.start * inner, rows.numel * inner)


def items_of(index: int, shape: Shape, batch: Batch, cut: Cut, update_cut: Cut) -> list[MatrixItem]:
    """Returns the items of a parameter: matrices that are whole on one rank apart from those that are cut.

    Args:
        index: the number of the parameter.
        shape: its unsharded shape.
        batch: how it is made of matrices, one behind the other.
        cut: how its gradient is cut.
        update_cut: how it is cut itself.
    """
    number, rows, columns = batch
    size = rows * columns
    if max(cut.view[0], update_cut.view[0]) > 1 or not size:
        return [MatrixItem(index, Extent(0, prod(shape)), batch, cut, update_cut)] if size else []
    borders = {0, number}
    for stop in set(accumulate(numels_of(cut, Extent(0, prod(shape)), tuple(range(cut.num_ranks))))):
        borders |= {stop // size, -(-stop // size)}  # the last matrix of a run may be shared with its neighbour
    ends = sorted(borders)
    return [
        MatrixItem(index, Extent(first * size, (last - first) * size), (last - first, rows, columns), cut, update_cut)
        for first, last in pairwise(ends)
    ]


def with_owners(items: Sequence[MatrixItem], ring: Ring) -> list[MatrixItem]:
    """Returns the items with their owners, all ranks of the ring the same.

    An item of whose gradient ranks hold all is computed by one of these ranks, any other item by any rank.
    """
    works, ranks = [], range(len(ring.ranks))
    for item in items:
        numels = numels_of(item.cut, item.elements, ring.piece_of)
        holders = [rank for rank in ranks if numels[rank] == item.elements.numel]
        works.append(MatrixWork(item.flops, item.elements.numel, holders or ranks))
    owners = owners_of(works, len(ring.ranks))
    return [replace(item, owner=owner) for item, owner in zip(items, owners, strict=True)]


Sizes = tuple[list[int], list[list[int]]]
"""How many elements each rank of the ring is sent, and how many are received from it, part by part."""

HEADER = 3
"""The first elements of what travels to an owner: what has no gradient at its sender, see `header_of`."""


def header_of(missing: Sequence[int]) -> list[int]:
    """Returns numbers up to 255, which every dtype holds exactly, that tell sets of parameters without gradient apart.

    The first two are the first number of `missing`, plus 1; they are 0 if nothing is missing.
    """
    first = missing[0] + 1 if missing else 0
    return [first // 256 % 256, first % 256, zlib.crc32(repr(list(missing)).encode()) % 256 if missing else 0]


class Exchange:
    """The way of some items to their owners and back, worked out once: the same, in one order, on all ranks.

    Gradients of items that are `at_owners` do not travel. Then the header comes with the updates.
    """

    def __init__(self, items: Sequence[MatrixItem], ring: Ring) -> None:
        self.ring = ring
        self.own = [item for item in items if item.owner == ring.rank]
        self.at_owners = all(item.has_all(item.cut, ring.piece_of[item.owner]) for item in items)
        piece, ranks = ring.piece_of[ring.rank], range(len(ring.ranks))
        of_rank = [[item for item in items if item.owner == rank] for rank in ranks]
        held = [
            [
                (item, held)
                for item in line
                if self._sends(ring.rank, item) and (held := item.held(item.cut, piece)).numel
            ]
            for line in of_rank
        ]
        self._sent = [[(item.index, part.start, part.stop) for item, part in line] for line in held]
        received = [
            [
                (number, item.place(item.cut, other))
                for number, item in enumerate(self.own)
                if self._sends(rank, item) and item.held(item.cut, other).numel
            ]
            for rank, other in enumerate(ring.piece_of)
        ]
        """The own items of which each rank sends a piece, by number, and where the piece is."""
        self._received = [part for line in received for part in line]
        self._there: Sizes = (
            [HEADER + sum(stop - start for _, start, stop in line) for line in self._sent],
            [[HEADER, *(place.numel for _, place in line)] for line in received],
        )
        updated = [
            [(item.index, part) for item in line if (part := item.held(item.update_cut, piece)).numel]
            for line in of_rank
        ]
        self._updated = [part for line in updated for part in line]
        """The elements of local tensors that updates come back of."""
        self._sent_back = [
            [
                (number, item.place(item.update_cut, other))
                for number, item in enumerate(self.own)
                if item.held(item.update_cut, other).numel
            ]
            for other in ring.piece_of
        ]
        first = [HEADER] if self.at_owners else []
        self._back: Sizes = (
            [sum(first) + sum(place.numel for _, place in line) for line in self._sent_back],
            [[*first, *(part.numel for _, part in line)] for line in updated],
        )

    def _sends(self, rank: int, item: MatrixItem) -> bool:
        """Returns whether a rank, if it holds a piece of the gradient of `item`, sends that piece to the owner."""
        if item.has_all(item.cut, self.ring.piece_of[item.owner]):
            return rank == item.owner
        return rank in self.ring.senders(item.owner)

    def there(self, local: Mapping[int, torch.Tensor], header: torch.Tensor) -> Moving:
        """Start to send this rank's pieces, 1-D, by the numbers of their parameters, to the owners.

        Args:
            local: the pieces.
            header: goes to every rank of the ring. All travels in its dtype.
        """
        parts: list[torch.Tensor] = []
        for line in self._sent:
            parts.append(header)
            parts += [local[index][start:stop] for index, start, stop in line]
        return self._start(parts, self._there, header)

    def whole(self, moving: Moving) -> tuple[dict[MatrixItem, torch.Tensor], list[torch.Tensor]]:
        """Returns the own items, each [number, rows, columns], when their pieces are here, and all ranks' headers."""
        lines = moving.wait()
        headers = [line[0] for line in lines]
        pieces = [piece for line in lines for piece in line[1:]]
        wholes = [moving.buffer.new_empty(item.elements.numel) for item in self.own]
        if pieces:
            places = [place.of(wholes[number]) for number, place in self._received]
            torch._foreach_copy_(places, [p.view(place.shape) for p, place in zip(pieces, places, strict=True)])
        return {item: whole.view(item.batch) for item, whole in zip(self.own, wholes, strict=True)}, headers

    def back(self, updates: Mapping[MatrixItem, torch.Tensor], header: torch.Tensor) -> Moving:
        """Start to send the pieces of `updates`, of all own items, to their holders, in the dtype of `header`."""
        flat = [updates[item].reshape(-1) for item in self.own]
        parts: list[torch.Tensor] = []
        for line in self._sent_back:
            parts += [header] if self.at_owners else []
            parts += [place.of(flat[number]).reshape(-1) for number, place in line]
        return self._start(parts, self._back, header)

    def arrived(self, moving: Moving) -> tuple[list[tuple[int, Extent, torch.Tensor]], list[torch.Tensor]]:
        """Returns parameters' numbers, elements of their local tensors, and the updates of these; and all headers."""
        lines = moving.wait()
        headers = [line.pop(0) for line in lines] if self.at_owners else []
        pieces = [piece for line in lines for piece in line]
        updates = [(index, held, each) for (index, held), each in zip(self._updated, pieces, strict=True)]
        return updates, headers

    def _start(self, parts: Sequence[torch.Tensor], sizes: Sizes, like: torch.Tensor) -> Moving:
        """Start the all-to-all: `parts` behind one another, of which each rank gets as many elements as `sizes` say."""
        group, order, dtype = self.ring.group, self.ring.order, like.dtype
        sent, numels = sizes
        line = torch.cat([p if p.dtype == dtype else p.to(dtype) for p in parts]) if parts else like.new_empty(0)
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

    def wait(self) -> list[list[torch.Tensor]]:
        """Returns what has come from each rank of the ring, its parts 1-D."""
        if self.work is not None:
            with named("the exchange of matrices", self.group):
                self.work.wait()
        parts = iter(self.buffer.split([numel for number in self.order for numel in self.numels[number]]))
        by_number = {number: [next(parts) for _ in self.numels[number]] for number in self.order}
        return [by_number[number] for number in range(len(self.order))]
