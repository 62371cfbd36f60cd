"""The weights that have changed since they were last sent: each rank compares its own shards with a copy on the host.

rank 0    shards | copy        changed: positions, values ──┐
rank 1    shards | copy        changed: positions, values ──┴──all-gathered──▶ a delta of each tensor, on all ranks

Ranks first tell how much has changed. If positions and values would take more bytes than the tensor, or if a rank has
no copy of what was sent, the tensor is gathered in full.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sherd._torch import device_of
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.encoding import in_buckets
from sherd.checkpoint.full_tensors import Full, FullTensors
from sherd.checkpoint.pieces import pieces_here
from sherd.comm.groups import group_of
from sherd.comm.transport import Sizes
from sherd.comm.transports import transport_of
from sherd.deltas.delta import WeightDelta, bits_of
from sherd.engine import Line
from sherd.errors import StateError, UnsupportedError, in_short
from sherd.layout.boxes import Box, start_of_run, whole
from sherd.policy import CommPolicy
from sherd.tensor.ragged import local_part

Changed = tuple[torch.Tensor, torch.Tensor]
"""Positions in the flattened unsharded tensor, and the new values at them; both 1-D."""

_COMPARED_AT_ONCE = 1 << 20
"""Elements: what is compared at once is cast, and the copy brought to its device."""

_EVERYTHING = -1
"""The number of changes that a rank tells if it does not know what was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """This rank's shards as they were last sent: `values` are 1-D tensors in host memory, of the shards in `layout`."""

    layout: tuple[Full, tuple[Box, ...]]
    values: tuple[torch.Tensor, ...]


class WeightMark:
    """A record of the weights that were last sent, for `iter_full_parameters(model, changed_since=mark)`.

    A fresh mark has nothing, so the first loop sends everything. Each rank keeps a copy of its own shards in the dtype
    that is sent, in host memory (page-locked if the shards are on an accelerator). If a loop does not reach its end on
    a rank, or the mark is reset on it, the next one sends everything, on all ranks. A copy of a mark, pickled or not,
    is a fresh one.
    """

    def __init__(self) -> None:
        self.reset()

    def __reduce__(self) -> tuple[type[WeightMark], tuple[()]]:  # two marks of one chain would confuse receivers
        return type(self), ()

    def reset(self) -> None:
        """Forget what was sent: the next loop sends everything, and begins a new chain of deltas."""
        self._stream, self._number = secrets.token_hex(8), 0
        self._copies: dict[str, _Copy] = {}
        self._part: int | None = None
        self._is_at_rest = True
        self._chain, self._num_loops = 0, 0
        """A number that the marks of all ranks share once they have sent together, and their loops since."""

    @property
    def at(self) -> str:
        """The mark that the last delta leads to, as "stream:number"."""
        return f"{self._stream}:{self._number}"

    # What `iter_full_parameters` asks

    def own_changes(self, tensors: FullTensors, names: Sequence[str], rank: int) -> Iterator[WeightDelta]:
        """Yields what has changed in this rank's shards of the tensors `names`, without communication.

        Of elements on several ranks, the first rank yields the changes, as far as the meshes of the model's tensors
        tell.
        """
        stream = self._begin(tensors, rank, names)
        meshes = [each.device_mesh.mesh for each in tensors.by_name.values() if isinstance(each, DTensor)]
        widest = max(meshes, key=torch.Tensor.numel, default=torch.zeros(1))
        for name in names:
            tensors.require_readable()
            if _is_made(tensors, name):
                raise UnsupportedError(
                    f"iter_full_parameters(own_part=True): {name} is put together from all ranks' parts by a function "
                    "of its own; leave own_part out"
                )
            tensor, full = tensors.by_name[name], tensors.described[name]
            is_sent = rank == widest.flatten()[0]
            if isinstance(tensor, DTensor) and tensor.numel():
                places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False)
                is_copy = any(at for placement, at in places if placement.is_replicate())
                is_sent = not is_copy and not _is_later_slice(tensor.device_mesh.mesh, widest)
            pieces, changes = self.changes_of(tensors, name) if is_sent else ([], None)
            for number, (box, part) in enumerate(pieces):
                where, values = (box.offsets, part) if changes is None else changes[number]
                if changes is None or _takes_more(values.numel(), box.numel, full):
                    where, values = box.offsets, part.to(full.dtype, copy=True, memory_format=torch.contiguous_format)
                if changes is None or values.numel():
                    yield self._delta(stream, name, full.shape, where, values)
        self._end(stream)

    def all_changes(
        self, tensors: FullTensors, names: Sequence[str], bucket_bytes: int, shown: bool
    ) -> Iterator[WeightDelta]:
        """Yields what has changed in the tensors `names`, in order; nothing unless `shown`.

        All ranks must read the same names to their end, or stop behind the same name.
        """
        self._begin(tensors, None, names)
        self._agree(tensors)
        stream = self._stream
        for members in in_buckets(names, lambda name: tensors.described[name].nbytes, bucket_bytes):
            tensors.require_readable()
            joined = _joined(tensors, members, self)
            reading = tensors.read([name for name in members if name not in joined], bucket_bytes, shown)
            for name in members if shown else ():
                if name not in joined:
                    value = next(reading)[1]
                    yield self._delta(stream, name, value.shape, (0,) * value.dim(), value)
                    continue
                positions, values = joined.pop(name)
                if positions.numel():
                    yield self._delta(stream, name, tensors.described[name].shape, positions, values)
            for _ in reading:  # ranks that show nothing take part, too
                pass
        self._end(stream)

    # The chain

    def _begin(self, tensors: FullTensors, part: int | None, names: Sequence[str]) -> str:
        """Begin a loop over `names`, of all ranks or of the rank `part`, and return its stream."""
        for name in names:
            _elements_of(name, local_part(tensors.by_name[name]))
        if gone := set(map(without_wrappers, self._copies)) - set(map(without_wrappers, tensors.by_name)):
            raise StateError(
                f"iter_full_parameters(changed_since=...): the model no longer has {in_short(sorted(gone))}, or has it "
                "under another name; call reset() of the mark, and make new receivers, which else keep old values"
            )
        if not self._is_at_rest or part != self._part:
            self.reset()
        self._part, self._is_at_rest = part, False
        self._copies = {name: self._copies[name] for name in names if name in self._copies}
        return self._stream

    def _agree(self, tensors: FullTensors) -> None:
        """Start over on all ranks if one does. Otherwise a rank would send in full what others compare.

        Raises:
            StateError: ranks give marks that were not used together, on all of them.
        """
        meshes = {each.device_mesh: name for name, each in tensors.by_name.items() if isinstance(each, DTensor)}
        if not meshes:
            return
        way = _way_of(tensors, meshes[max(meshes, key=DeviceMesh.size)])
        assert way.mesh is not None, "a DTensor has one"
        way = replace(way, axes=tuple(axis for axis in range(way.mesh.ndim) if way.mesh.size(axis) > 1))
        own = [dist.get_rank(), secrets.randbits(60), self._chain, self._num_loops]
        line = torch.tensor(own, dtype=torch.int64, device=way.device)
        rows = way._gathered(line, torch.full(way._num_ranks, len(own))).view(-1, len(own)).tolist()
        if any(not chain for _, _, chain, _ in rows):
            if self._chain:
                self.reset()
                self._is_at_rest = False
            self._chain = sum(token for _, token, _, _ in rows) % 2**60 + 1
        elif len({(chain, num_loops) for _, _, chain, num_loops in rows}) > 1:
            loops = ", ".join(f"rank {rank} one of {num} loops" for rank, _, _, num in sorted(rows))
            raise StateError(
                f"iter_full_parameters(changed_since=...): the ranks give marks that were not used together: {loops}. "
                "Give all ranks the mark of one consumer; after reset() of a mark on any rank everything is sent again"
            )
        self._num_loops += 1

    def _end(self, stream: str) -> None:
        self._is_at_rest = stream == self._stream

    def _delta(
        self, stream: str, name: str, shape: torch.Size, where: torch.Tensor | Sequence[int], values: torch.Tensor
    ) -> WeightDelta:
        """Returns the next delta of `stream`: `values` at positions, or in a box from an index on."""
        if stream != self._stream:
            raise StateError(
                f"iter_full_parameters(changed_since=...): the mark of this loop, {stream}, was reset or used by "
                "another loop; let one loop end before the next begins, or give each loop a WeightMark of its own"
            )
        since = self.at
        self._number += 1
        positions, offsets = (where, ()) if isinstance(where, torch.Tensor) else (None, tuple(where))
        plain, values = without_wrappers(name), _elements_of(name, values)
        return WeightDelta(plain, tuple(shape), since, self.at, values, positions, offsets, self._part)

    def changes_of(
        self, tensors: FullTensors, name: str
    ) -> tuple[list[tuple[Box, torch.Tensor]], list[Changed] | None]:
        """Returns this rank's shards of a tensor, and the changes of each, which count as sent from now on.

        None: everything, since these shards, in this dtype, were not sent before.
        """
        full = tensors.described[name]
        pieces = [(box, _elements_of(name, part)) for box, part in pieces_here(name, tensors.by_name[name])]
        layout, known = (full, tuple(box for box, _ in pieces)), self._copies.get(name)
        if known is None or known.layout != layout:
            self._copies[name] = _Copy(layout, tuple(_host_copy(part, full.dtype) for _, part in pieces))
            return pieces, None
        return pieces, [_changed(*piece, copy, full) for piece, copy in zip(pieces, known.values, strict=True)]


def _elements_of(name: str, values: torch.Tensor) -> torch.Tensor:
    """Returns `values` as a plain tensor. Raises UnsupportedError if their memory has not their shape and dtype."""
    while flatten := getattr(values, "__tensor_flatten__", None):
        inner = [getattr(values, attribute).detach() for attribute in flatten()[0]]
        if [(each.shape, each.dtype) for each in inner] != [(values.shape, values.dtype)]:
            raise UnsupportedError(
                f"iter_full_parameters(changed_since=...): {name} is a {type(values).__name__}, which has no elements "
                "to compare; leave changed_since out, or put the dequantized tensor in its place"
            )
        (values,) = inner
    return values


def _host_copy(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    copy = torch.empty(part.numel(), dtype=dtype, pin_memory=part.device.type != "cpu")
    for old, new in zip(copy.split(_COMPARED_AT_ONCE), part.reshape(-1).split(_COMPARED_AT_ONCE), strict=True):
        old.copy_(new.to(dtype))
    return copy


def _changed(box: Box, part: torch.Tensor, copy: torch.Tensor, full: Full) -> Changed:
    """Returns the changes of `part`, the elements in `box`, and writes them to `copy`, the old values."""
    places = [torch.empty(0, dtype=_position_dtype(full), device=part.device)]
    values = [bits_of(torch.empty(0, dtype=full.dtype, device=part.device))]
    start = 0
    for old, new in zip(copy.split(_COMPARED_AT_ONCE), part.reshape(-1).split(_COMPARED_AT_ONCE), strict=True):
        was, now = bits_of(old), bits_of(new.to(full.dtype))
        differs = was.to(now.device) ^ now  # not `!=`: one pass less on a CPU
        at = (differs if differs.dim() == 1 else differs.any(1)).nonzero().view(-1)
        if at.numel():
            values.append(now[at])
            was.index_copy_(0, at.to(was.device), values[-1].to(was.device))
            places.append(_positions(at + start, box, full))
        start += old.numel()
    return torch.cat(places), torch.cat(values).view(-1).view(full.dtype)


def _position_dtype(full: Full) -> torch.dtype:
    return torch.int32 if full.shape.numel() < 1 << 31 else torch.int64


def _positions(at: torch.Tensor, box: Box, full: Full) -> torch.Tensor:
    """Returns the places in the flattened tensor of the elements that are `at` in the flattened box."""
    shape = tuple(full.shape)
    positions, first = at, start_of_run(whole(shape), box)
    if first is None:
        positions, first = torch.zeros_like(at), 0
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            positions += (at // prod(box.sizes[dim + 1 :]) % size + offset) * prod(shape[dim + 1 :])
    return (positions + first).to(_position_dtype(full))


def _takes_more(num_changes: int, numel: int, full: Full) -> bool:
    return num_changes * (_position_dtype(full).itemsize + full.dtype.itemsize) > numel * full.dtype.itemsize


def _is_made(tensors: FullTensors, name: str) -> bool:
    """Returns whether a user's function makes the unsharded parameter, so that its elements are not the shards'."""
    record = tensors.records.get(name)
    return record is not None and (record.restored is not None or Line.gathers_itself(record))


def _is_later_slice(mesh: torch.Tensor, widest: torch.Tensor) -> bool:
    """Returns whether `mesh` is a slice of `widest`, and not the first: as [1, 3], but not [0, 2], of 2 x 2 ranks."""
    found = torch.isin(widest, mesh).nonzero()
    is_fixed = (found == found[:1]).all(0).tolist()
    numel = prod(size for size, fixed in zip(widest.shape, is_fixed, strict=True) if not fixed)
    return mesh.ndim < widest.ndim and len(found) == mesh.numel() == numel and bool(found[0].any())


def _joined(tensors: FullTensors, names: Sequence[str], mark: WeightMark) -> dict[str, Changed]:
    """Returns the changes of all ranks in the tensors `names`, without those that are to be gathered in full."""
    ways: dict[_Way, dict[str, list[Changed] | None]] = {}
    for name in names:
        changes = None if _is_made(tensors, name) else mark.changes_of(tensors, name)[1]
        ways.setdefault(_way_of(tensors, name), {})[name] = changes
    joined: dict[str, Changed] = {}
    for way, found in ways.items():
        joined |= way.join(found, tensors.described)
    return joined


def _way_of(tensors: FullTensors, name: str) -> _Way:
    tensor, full, record = tensors.by_name[name], tensors.described[name], tensors.records.get(name)
    if not isinstance(tensor, DTensor):
        return _Way(None, (), CommPolicy(), tensor.device, full.dtype, _position_dtype(full))
    mesh, comm = tensor.device_mesh, CommPolicy() if record is None else record.mesh.comm
    cut = (axis for axis, each in enumerate(tensor.placements) if mesh.size(axis) > 1 and not each.is_replicate())
    return _Way(mesh, tuple(cut), comm, device_of(mesh), full.dtype, _position_dtype(full))


@dataclass(frozen=True, slots=True)
class _Way:
    """How changes are gathered: over some axes of a mesh, one after the other. Tensors of one way go together."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    comm: CommPolicy
    device: torch.device
    dtype: torch.dtype
    position_dtype: torch.dtype

    def join(self, found: Mapping[str, list[Changed] | None], described: Mapping[str, Full]) -> dict[str, Changed]:
        """Returns the changes that all ranks have `found`, but of tensors that take fewer bytes in full."""
        own = [_EVERYTHING if each is None else sum(at.numel() for at, _ in each) for each in found.values()]
        line = torch.tensor(own, dtype=torch.int64, device=self.device)
        told = self._gathered(line, torch.full(self._num_ranks, len(own))).view(-1, len(own)).cpu().unbind(1)
        counts = {
            name: of_ranks
            for (name, full), of_ranks in zip(((name, described[name]) for name in found), told, strict=True)
            if of_ranks.min() >= 0 and not _takes_more(int(of_ranks.sum()), full.shape.numel(), full)
        }
        if not counts:
            return {}
        table = torch.stack(list(counts.values()), 1)
        joined = []
        for which, dtype in enumerate((self.position_dtype, self.dtype)):
            lines = [each[which].to(self.device).view(torch.uint8) for name in counts for each in found[name] or ()]
            line = torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *lines])
            sizes = table * dtype.itemsize
            rows = self._gathered(line, sizes.sum(1).view(self._num_ranks)).split(sizes.flatten().tolist())
            joined.append([torch.cat(rows[number :: len(counts)]).view(dtype) for number in range(len(counts))])
        return dict(zip(counts, zip(*joined, strict=True), strict=True))

    @property
    def _num_ranks(self) -> list[int]:
        """The number of ranks along each axis, the first axis last, since it is the fastest."""
        return [self.mesh.size(axis) for axis in reversed(self.axes)] if self.mesh else [1]

    def _gathered(self, line: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Returns the lines of all ranks, one after the other, of `sizes` elements, in the order of `_num_ranks`.

        axes (1, 0) of a mesh (2, 2)        along axis 1: 0 1 | 2 3        then along axis 0: 0 1 2 3
        """
        for number, axis in enumerate(self.axes):
            assert self.mesh is not None, "it has axes"
            later = tuple(self.mesh.get_local_rank(each) for each in reversed(self.axes[number + 1 :]))
            parts = Sizes(sizes[later].reshape(self.mesh.size(axis), -1).sum(1).tolist())
            if sum(parts):
                rows = torch.empty(sum(parts), dtype=line.dtype, device=line.device)
                transport_of(group_of(self.mesh, axis), self.device, self.comm).all_gather(rows, line, parts, False)
                line = rows
        return line
