"""How matrices whose elements lie on several ranks travel to their owners, and what is computed of them back.

    rank 0  | w1 rows 0-1 | w2 rows 0-1 |     there    rank 0 (owner of w1)  | w1 rows 0-3 |
    rank 1  | w1 rows 2-3 | w2 rows 2-3 |    ------>   rank 1 (owner of w2)  | w2 rows 0-3 |
                                              back
                                             <------

One all-to-all there and one back for all matrices of a bucket, packed without padding. Where shards are replicated, the
replicas divide the matrices: an owner receives from the ranks of its own replica, and sends to the ranks of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
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


class Ring:
    """The ranks that hold the pieces of some parameters, numbered by shard and then by replica.

    `rank` is this rank's number. `piece_of[number]` is the piece of each parameter that a rank holds.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self.mesh = mesh
        self.num_replicas = mesh.num_replicas
        self.ranks = [rank for copies in mesh.copies_of_shards() for rank in copies]
        self.rank = mesh.shard_rank * mesh.num_replicas + mesh.replica
        self.piece_of = [
            mesh.pieces_of(shard)[replica if mesh.shards_replicas else 0]
            for shard in range(mesh.num_shards)
            for replica in range(mesh.num_replicas)
        ]

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The group of all these ranks. All of them ask for it at the same moment when they do so first."""
        everybody = default_group()
        for group in (self.mesh.shard_group, self.mesh.replicate_group, everybody):
            if group is not None and group.size() == len(self.ranks):
                return group
        return group_beside(everybody, "matrices", sorted(self.ranks), self.mesh.device)

    def senders(self, owner: int) -> list[int]:
        """Returns the numbers of the ranks that send their pieces to `owner`, each piece once."""
        if self.mesh.shards_replicas:
            return list(range(len(self.ranks)))
        return list(range(owner % self.num_replicas, len(self.ranks), self.num_replicas))


@dataclass(frozen=True)
class MatrixItem:
    """Whole matrices of one parameter that one rank computes.

    Attributes:
        index: the number of the parameter among those that are stepped.
        elements: the elements of the flattened parameter that the matrices are.
        batch: the matrices.
        cut: how the parameter is cut.
        owner: the number in the ring of the rank that computes them.
    """

    index: int
    elements: Extent
    batch: Batch
    cut: Cut
    owner: int = 0

    @property
    def flops(self) -> float:
        """The work of a function of whole matrices, up to a factor."""
        number, rows, columns = self.batch
        return number * rows * columns * min(rows, columns)

    def held(self, piece: int) -> Extent:
        """Returns the elements of a piece's flattened tensor that belong to the matrices."""
        if self.cut.view[0] > 1:
            return Extent(0, self.cut.local_numel(piece))
        run = run_of(self.cut, piece)
        return run.intersect(self.elements).shifted(-run.start)

    def place(self, whole: torch.Tensor, piece: int) -> torch.Tensor:
        """Returns the view of `whole`, these matrices, 1-D, where a piece's elements are."""
        outer, size, inner = self.cut.view
        if outer > 1:
            rows = self.cut.piece(piece)
            return whole.view(outer, size, inner)[:, rows.start : rows.stop]
        part = run_of(self.cut, piece).intersect(self.elements).shifted(-self.elements.start)
        return whole[part.start : part.stop]


def run_of(cut: Cut, piece: int) -> Extent:
    """Returns the elements of a flattened tensor that are in a piece, of a cut whose pieces are consecutive."""
    rows, inner = cut.piece(piece), cut.view[2]
    return Extent(rows.start * inner, rows.numel * inner)


def items_of(index: int, shape: Shape, batch: Batch, cut: Cut) -> list[MatrixItem]:
    """Returns the items of a parameter: matrices that are whole on one rank apart from those that are cut.

    Args:
        index: the number of the parameter.
        shape: its unsharded shape.
        batch: how it is made of matrices, one behind the other.
        cut: how it is cut.
    """
    number, rows, columns = batch
    size = rows * columns
    if cut.view[0] > 1 or not size:
        return [MatrixItem(index, Extent(0, prod(shape)), batch, cut)] if size else []
    borders = {0, number}
    for piece in range(cut.num_ranks):
        run = run_of(cut, piece)
        # The first and the last matrix of a run may be shared with its neighbours.
        borders |= {run.start // size, -(-run.start // size), run.stop // size, -(-run.stop // size)}
    ends = sorted(borders)
    return [
        MatrixItem(index, Extent(first * size, (last - first) * size), (last - first, rows, columns), cut)
        for first, last in pairwise(ends)
    ]


def candidates_of(item: MatrixItem, ring: Ring) -> list[int]:
    """Returns the numbers of the ranks that may compute `item`: those that hold all of it, or else all ranks."""
    numel = item.elements.numel
    whole = [rank for rank, piece in enumerate(ring.piece_of) if item.held(piece).numel == numel]
    return whole or list(range(len(ring.ranks)))


def with_owners(items: Sequence[MatrixItem], ring: Ring) -> list[MatrixItem]:
    """Returns the items with their owners, all ranks of the ring the same."""
    works = [MatrixWork(item.flops, item.elements.numel, candidates_of(item, ring)) for item in items]
    owners = owners_of(works, len(ring.ranks))
    return [
        MatrixItem(item.index, item.elements, item.batch, item.cut, owner)
        for item, owner in zip(items, owners, strict=True)
    ]


class Exchange:
    """The way of some items to their owners and back: the same items, in the same order, on all ranks of the ring."""

    def __init__(self, items: Sequence[MatrixItem], ring: Ring) -> None:
        self.ring = ring
        self._own = [item for item in items if item.owner == ring.rank]
        numbers, piece = range(len(ring.ranks)), ring.piece_of[ring.rank]
        mine = [[item for item in items if item.owner == rank and item.held(piece).numel] for rank in numbers]
        self._updated = [[(item.index, item.held(piece)) for item in own] for own in mine]
        """The elements of local tensors that each rank computes updates of."""
        self._sent = [(each.index, each.held(piece)) for own in mine for each in own if self._sends(ring.rank, each)]
        self._num_sent = [sum(each.held(piece).numel for each in own if self._sends(ring.rank, each)) for own in mine]
        self._parts = [[(item, other) for item in self._own if item.held(other).numel] for other in ring.piece_of]
        """The own items of which each rank holds a piece, and the piece."""
        self._received = [
            [(item, other) for item, other in parts if self._sends(rank, item)]
            for rank, parts in enumerate(self._parts)
        ]
        self._num_received = [_numel(parts) for parts in self._received]
        self._num_sent_back = [_numel(parts) for parts in self._parts]
        self._num_back = [sum(held.numel for _, held in updated) for updated in self._updated]

    def _sends(self, rank: int, item: MatrixItem) -> bool:
        """Returns whether a rank, which holds a piece of `item`, sends that piece to its owner."""
        if item.held(self.ring.piece_of[item.owner]).numel == item.elements.numel:
            return rank == item.owner
        return rank in self.ring.senders(item.owner)

    def there(self, local: Mapping[int, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Moving:
        """Start to send this rank's pieces, 1-D, by the numbers of their parameters, to the owners."""
        parts = [local[index][held.start : held.stop] for index, held in self._sent]
        return self._start(parts, self._num_sent, self._num_received, dtype, device)

    def whole(self, moving: Moving) -> dict[MatrixItem, torch.Tensor]:
        """Returns the own items, each [number, rows, columns], when their pieces are here."""
        wholes = {item: moving.buffer.new_empty(item.elements.numel) for item in self._own}
        for line, parts in zip(moving.wait(), self._received, strict=True):
            start = 0
            for item, piece in parts:
                place = item.place(wholes[item], piece)
                place.copy_(line[start : start + place.numel()].view(place.shape))
                start += place.numel()
        return {item: whole.view(item.batch) for item, whole in wholes.items()}

    def back(self, updates: Mapping[MatrixItem, torch.Tensor], dtype: torch.dtype, device: torch.device) -> Moving:
        """Start to send the pieces of `updates`, one for each own item, to all ranks that hold them."""
        flat = {item: update.reshape(-1) for item, update in updates.items()}
        pieces = [item.place(flat[item], piece).reshape(-1) for parts in self._parts for item, piece in parts]
        return self._start(pieces, self._num_sent_back, self._num_back, dtype, device)

    def arrived(self, moving: Moving) -> Iterable[tuple[int, Extent, torch.Tensor]]:
        """Yields the number of a parameter, the elements of its local tensor, and their updates."""
        for line, updated in zip(moving.wait(), self._updated, strict=True):
            start = 0
            for index, held in updated:
                yield index, held, line[start : start + held.numel]
                start += held.numel

    def _start(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[int],
        received: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Moving:
        """Start the all-to-all: `parts` behind one another, of which each rank gets `sent[rank]` elements."""
        group = self.ring.group
        line = torch.cat([part.to(dtype) for part in parts]) if parts else torch.empty(0, dtype=dtype, device=device)
        order = [self.ring.ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
        if order != sorted(order):
            pieces = line.split(list(sent))
            line = torch.cat([pieces[number] for number in order])
        sizes = [received[number] for number in order]
        buffer = line.new_empty(sum(sizes))
        with named("the exchange of matrices", group):
            work = dist.all_to_all_single(
                buffer, line, sizes, [sent[number] for number in order], group=group, async_op=True
            )
        return Moving(work, line, buffer, sizes, order, group)


def _numel(parts: Sequence[tuple[MatrixItem, int]]) -> int:
    return sum(item.held(piece).numel for item, piece in parts)


@dataclass
class Moving:
    """An all-to-all under way. `line`, what is sent, lives until it has ended."""

    work: dist.Work | None
    line: torch.Tensor
    buffer: torch.Tensor
    numels: list[int]
    order: list[int]
    group: dist.ProcessGroup

    def wait(self) -> list[torch.Tensor]:
        """Returns what has come from each rank of the ring, 1-D."""
        if self.work is not None:
            with named("the exchange of matrices", self.group):
                self.work.wait()
        received = self.buffer.split(self.numels)
        by_number = dict(zip(self.order, received, strict=True))
        return [by_number[number] for number in range(len(self.order))]
