"""Parameters gathered outside forward and backward, for a reader or a user: several in one collective, in any dtype.

ranks share memory                shards ──────────────────────────────────▶ unsharded buffer
rows are the unsharded buffer     shards ──copied──▶ own part of the rows ──▶ rows
else                              shards ──copied──▶ own part of the rows ──▶ rows ──copied──▶ unsharded buffer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch

from sherd._torch import storage_uses
from sherd.comm.buffers import Buffer, advise_pages, prepare_pages
from sherd.comm.failures import announced
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Handoff, streams_for
from sherd.comm.transport import Pending, Sizes
from sherd.engine.moves.buffer_views import copy_out, tensor_in
from sherd.engine.state.fetching import fetch_into
from sherd.engine.state.parameter import ShardedParameter
from sherd.layout.extent import Extent, aligned
from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Cut

_ALIGNED = 64
"""Tensors in one buffer begin at multiples of as many bytes."""

_MOST_KEPT = 4
"""Times the usual size of a buffer: three buckets, and what is copied out of their rows."""

_ALONE_BYTES = 1 << 20
"""Without streams and shared memory, unsharded tensors of at least this size are gathered straight into place."""


class Gatherer:
    """Gathers parameters into memory of its own. Each tensor in the memory belongs to its holder.

    In host memory a buffer is used again once no tensor in it is alive: to map new memory takes as long as to fill
    it. A buffer has `usual_bytes`, or more if it must, or a power of two of bytes if that is less.
    """

    def __init__(self, usual_bytes: int = 0) -> None:
        self._usual_bytes = usual_bytes
        self._buffers: list[tuple[Buffer, int]] = []

    def gathering(self, lines: Sequence[Line], what: str = "") -> Gathering:
        """Returns the gathering of `lines`, to be started, with the words for it in errors."""
        return Gathering(lines, self, what)

    @staticmethod
    def goes_by_itself(mesh: DataMesh) -> bool:
        """Returns whether a collective goes on while the host works, without streams. Ranks that share memory copy."""
        return streams_for(mesh.device).in_host_order and not mesh.shard_transport.shares_memory

    def take(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.Tensor]:
        """Returns tensors of `numels` elements, 1-D and uninitialised, that share one buffer of their own."""
        ends, end = [], 0
        for numel, dtype in zip(numels, dtypes, strict=True):
            ends.append(end + numel * dtype.itemsize)
            end = aligned(ends[-1], _ALIGNED)
        buffer = self._buffer(end, device)
        return [
            buffer[stop - numel * dtype.itemsize : stop].view(dtype)
            for stop, numel, dtype in zip(ends, numels, dtypes, strict=True)
        ]

    def _buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        size = min(1 << (nbytes - 1).bit_length(), max(nbytes, self._usual_bytes))
        free = [buffer for buffer, own_uses in self._buffers if storage_uses(buffer.address) == own_uses]
        fitting = [buffer for buffer in free if buffer.nbytes >= size]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.nbytes).tensor
        if sum(buffer.nbytes for buffer, _ in self._buffers) + size > _MOST_KEPT * self._usual_bytes:
            self._buffers = [each for each in self._buffers if each[0] not in free]
        prepare_pages(size)
        buffer = Buffer(size, torch.uint8, device)
        advise_pages(buffer.tensor.untyped_storage())
        self._buffers.append((buffer, storage_uses(buffer.address)))
        return buffer.tensor


@lru_cache(maxsize=256)  # blocks are alike, and models are read again and again
def _packing(cuts: tuple[Cut, ...], num_ranks: int) -> Packing:
    return pack(cuts, num_ranks)


class Line:
    """Parameters in one packing, and their unsharded buffer, which is set once there is memory for it.

    `shard_buffer` has what is gathered, packed as the shards of a group are. None: the shards themselves.
    """

    def __init__(
        self, records: Sequence[ShardedParameter], dtype: torch.dtype, shard_buffer: torch.Tensor | None = None
    ) -> None:
        self.records = records
        self.mesh = mesh = records[0].mesh
        self.dtype = dtype
        self.packing = _packing(tuple(record.cut for record in records), mesh.num_pieces)
        self.unsharded: torch.Tensor | None = None
        self._shard_buffer = shard_buffer

    @classmethod
    def of(cls, wanted: Mapping[str, tuple[ShardedParameter, torch.dtype]]) -> dict[str, tuple[Line, int]]:
        """Returns for each parameter in `wanted`, with the dtype to send, its line and its number in the line.

        Parameters with an all-gather of their own, which no line holds, are left out.
        """
        together: dict[object, list[str]] = {}
        for name, (record, dtype) in wanted.items():
            if not cls.gathers_itself(record):
                together.setdefault(_line_of(record, dtype), []).append(name)
        places: dict[str, tuple[Line, int]] = {}
        for members in together.values():
            line = cls([wanted[name][0] for name in members], wanted[members[0]][1])
            places |= {name: (line, index) for index, name in enumerate(members)}
        return places

    @staticmethod
    def gathers_itself(record: ShardedParameter) -> bool:
        """Returns whether the parameter is of a tensor subclass with its own all-gather."""
        return hasattr(record.resting, "fsdp_pre_all_gather")

    @property
    def destination(self) -> torch.Tensor:
        assert self.unsharded is not None, "memory was given"
        return self.unsharded

    @property
    def goes_onto(self) -> bool:
        """True if ranks read one another's shards in place, which is possible along one axis only."""
        return self.mesh.shard_transport.shares_memory and not self.mesh.shards_replicas

    @property
    def lands_in_place(self) -> bool:
        """True if the unsharded buffer is needed at the start of the collective, False if at its end."""
        return self.goes_onto or self.packing.direct

    def held(self) -> list[Extent]:
        return [slot.held(self.mesh.piece) for slot in self.packing.slots]

    def shards(self) -> list[torch.Tensor]:
        """Returns this rank's shards, 1-D."""
        if self._shard_buffer is not None:
            return [self._shard_buffer[extent.start : extent.stop] for extent in self.held()]
        return [record.local.detach().reshape(-1) for record in self.records]

    def in_order(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part: shards in `dtype`, and tensors as long as the padding between them."""
        end = 0
        filled = ((extent, shard) for extent, shard in zip(self.held(), self.shards(), strict=True) if extent.numel)
        for extent, shard in sorted(filled, key=lambda each: each[0].start):
            if extent.start > end:
                yield torch.empty(extent.start - end, dtype=self.dtype)
            yield shard.to(self.dtype)
            end = extent.stop
        if end < self.packing.shard_numels[self.mesh.piece]:
            yield torch.empty(self.packing.shard_numels[self.mesh.piece] - end, dtype=self.dtype)

    def part(self, index: int) -> torch.Tensor:
        """Returns parameter `index`, a view of the unsharded buffer. Tensor-parallel axes are not gathered."""
        return tensor_in(self.destination, self.packing.slots[index])


class Gathering:
    """Lines that are gathered together, by one collective for all lines of one `_way_of`.

    All ranks of the axes that the lines are cut over make, start and wait for gatherings in the same order.
    """

    def __init__(self, lines: Sequence[Line], gatherer: Gatherer, what: str) -> None:
        self._gatherer, self._what = gatherer, what
        ways: dict[object, list[Line]] = {}
        for line in lines:
            ways.setdefault(_way_of(line), []).append(line)
        self._ways = list(ways.values())
        self._rows: dict[Line, torch.Tensor] = {}
        self._handoffs: list[Handoff] = []

    def start(self) -> None:
        """Start the collectives, behind compute's queue."""
        lines = [line for of_way in self._ways for line in of_way]
        self._give_memory([line for line in lines if line.lands_in_place])
        later = [line for line in lines if not line.lands_in_place]
        self._rows = self._taken(later, [line.packing.gathered_numel for line in later])
        for of_way in self._ways:
            mesh, numel = of_way[0].mesh, sum(line.packing.gathered_numel for line in of_way)
            lane = streams_for(mesh.device).gather
            lane.follow_compute()
            with announced(mesh.piece_groups, self._what or f"gathers {numel} elements to give them out", is_rare=True):
                self._handoffs.append(lane.run(partial(self._send, of_way)))

    def _taken(self, lines: Sequence[Line], numels: Sequence[int]) -> dict[Line, torch.Tensor]:
        if not lines:
            return {}
        taken = self._gatherer.take(numels, [line.dtype for line in lines], lines[0].mesh.device)
        return dict(zip(lines, taken, strict=True))

    def _give_memory(self, lines: Sequence[Line]) -> None:
        for line, unsharded in self._taken(lines, [line.packing.unsharded_numel for line in lines]).items():
            line.unsharded = unsharded

    def _send(self, lines: Sequence[Line], async_op: bool) -> Pending | None:
        transport = lines[0].mesh.shard_transport
        if lines[0].goes_onto:
            onto = _Onto(lines)
            return transport.all_gather_onto(onto.copy_into_place, onto.own_pieces(), onto.sizes, async_op)
        arguments = []
        for line in lines:
            rows = line.destination if line.lands_in_place else self._rows[line]
            arguments.append(_sent(line, rows[: line.packing.gathered_numel]))
        all_rows, shards, sizes = zip(*arguments, strict=True)
        return transport.all_gather_several(all_rows, shards, sizes, async_op)

    def wait(self) -> None:
        """Order compute after the collectives. Then the shards may be written again. Raises CommError."""
        for handoff, lines in zip(self._handoffs, self._ways, strict=True):
            handoff.wait()
            if any(record.local.device != line.mesh.device for line in lines for record in line.records):
                handoff.wait_on_host()  # the host may write to shards in its memory as soon as this returns

    def copy_out(self) -> None:
        """Fill the unsharded buffers of lines that did not land in place."""
        self._give_memory(list(self._rows))
        for line, rows in self._rows.items():
            copy_out(line.packing, line.destination)(rows)
        self._rows = {}


class _Onto:
    """Several lines gathered as one: a rank's parts of the lines, one after the other."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self.sizes = Sizes(map(sum, zip(*(line.packing.shard_numels for line in lines), strict=True)))
        self._copies = [copy_out(line.packing, line.destination) for line in lines]

    def own_pieces(self) -> list[torch.Tensor]:
        """Returns this rank's part, as one tensor per line; an empty tensor if it holds nothing."""
        pieces = [piece for line in self._lines for piece in line.in_order()]
        return pieces or [torch.empty(0, dtype=self._lines[0].dtype)]

    def copy_into_place(self, rank: int, part: torch.Tensor) -> None:
        start = 0
        for line, copy in zip(self._lines, self._copies, strict=True):
            size = line.packing.shard_numels[rank]
            copy.copy_into_place(rank, part[start : start + size])
            start += size


def _sent(line: Line, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Sizes]:
    """Returns the arguments of an all-gather over the shard axis: `rows`, this rank's part, the sizes of all parts."""
    mesh, starts, sizes = line.mesh, line.packing.starts, Sizes(line.packing.shard_numels)
    shard = _filled(rows[starts[mesh.piece] :][: sizes[mesh.piece]], line)
    together = sizes.together(mesh.num_owners)
    if mesh.shards_replicas:
        pieces, piece = mesh.pieces_of(mesh.shard_rank), shard
        shard = rows[starts[pieces.start] :][: together[mesh.shard_rank]]
        mesh.fetch_transport.all_gather(shard, piece, sizes.of(pieces), False)
    return rows, shard, together


def _filled(piece: torch.Tensor, line: Line) -> torch.Tensor:
    """Returns what this rank sends: `piece`, a part of the rows, filled with shards, or the shards' own memory."""
    shards, extents = line.shards(), line.held()
    sent = _in_place(shards, extents, piece)
    if sent is not None:
        return sent
    places = [piece[extent.start : extent.stop] for extent in extents]
    if all(shard.device == piece.device for shard in shards):
        torch._foreach_copy_(places, shards)
    else:
        for place, shard in zip(places, shards, strict=True):
            fetch_into(place, shard)
    return piece


def _in_place(shards: Sequence[torch.Tensor], extents: Sequence[Extent], piece: torch.Tensor) -> torch.Tensor | None:
    """Returns the memory of `shards` as a tensor like `piece`, if each shard is at its extent in it, else None."""
    filled = [(shard, extent) for shard, extent in zip(shards, extents, strict=True) if extent.numel]
    if not filled:
        return None
    first, start = filled[0][0], filled[0][0].storage_offset() - filled[0][1].start
    storage, numel = first.untyped_storage(), piece.numel()
    if start < 0 or (start + numel) * first.element_size() > storage.nbytes():
        return None
    for shard, extent in filled:
        is_like = shard.dtype == piece.dtype and shard.device == piece.device
        if not is_like or shard.untyped_storage()._cdata != storage._cdata:
            return None
        if shard.storage_offset() - extent.start != start:
            return None
    return first.as_strided((numel,), (1,), start)


def _way_of(line: Line) -> object:
    """Returns a key that is equal for lines that one collective gathers."""
    mesh = line.mesh
    return (mesh.shard_transport, line.goes_onto and (mesh.num_pieces, mesh.piece, line.dtype))


def _line_of(record: ShardedParameter, dtype: torch.dtype) -> object:
    """Returns a key that is equal for parameters of one `Line` of `dtype`."""
    mesh = record.mesh
    # Units have meshes of their own, over the same groups.
    ways = mesh.shard_transport, mesh.fetch_transport if mesh.shards_replicas else None, mesh.num_pieces, mesh.piece
    # Without shared memory the host would copy a large tensor out of the rows, which takes longer than a message.
    is_large = record.shape.numel() * dtype.itemsize >= _ALONE_BYTES
    alone = id(record) if Gatherer.goes_by_itself(mesh) and is_large else None
    # Tensors cut into runs fit one line only if one plan has cut them.
    plan = (id(record.owner), record.plan_id) if record.cut.in_line else alone
    return ways, dtype, plan
