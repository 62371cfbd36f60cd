"""Weights of one parameter whose tensor subclass brings its own all-gather: what is sent, and what becomes of it.

The protocol is torch's, as fp8, int8 and NF4 tensors implement it on the shard's local tensor:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype)                    -> (whole tensor, tensors to free with it)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=whole tensor)  -> None, the second time and later

For a smaller mesh of k ranks (`reshard_after_forward=k`) each keeps a k-th of every tensor that was gathered, as it
came. What those are is the subclass's own affair; k such parts in a row are the same bytes, which it gets again:

    sent by rank  0 1 2 3     gathered  | 0 1 2 3 |     kept, k = 2  0: | 0 1 |  1: | 2 3 |  2: | 0 1 |  3: | 2 3 |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd._torch import dtensor, dtensor_spec, will_get_gradient
from sherd.comm.buffers import Buffer
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import Pending, Transport
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.unsharded_buffer import Guard
from sherd.engine.moves.weights import Position
from sherd.engine.state.group import Group
from sherd.errors import PlacementError
from sherd.layout.placement import Cut
from sherd.policy import MixedPrecisionPolicy
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Live


@dataclass(frozen=True, slots=True)
class _Terms:
    """What is gathered: the shape of each tensor that a rank sends, and what the subclass wants to know of it later."""

    shapes: tuple[torch.Size, ...]
    metadata: Any


@dataclass(frozen=True, slots=True)
class _Flight:
    """All-gathers under way, one for each tensor that the subclass asked to send."""

    handoffs: tuple[Handoff, ...]
    sources: tuple[torch.Tensor, ...]
    terms: _Terms


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What has come, and which version of each buffer that was: the subclass may write in them."""

    terms: _Terms
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """This rank's part of each buffer, for a smaller mesh, the ranks of `group`."""

    parts: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup
    terms: _Terms


@dataclass(frozen=True, slots=True)
class _Made:
    """The unsharded parameter, and the tensors whose memory goes when it does."""

    parameter: nn.Parameter
    tensor: torch.Tensor
    inner: tuple[Buffer, ...]
    guard: Guard


class SelfGatheredWeights(Position, saved.Source):
    """The weights of a group of one such parameter; to the unit it is like any other group's."""

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        Position.__init__(self, group.name)
        saved.Source.__init__(self, unshard)
        self.group = group
        self.plan = plan
        (self._record,) = group.parameters
        self._streams = streams
        self._precision = precision
        self._watch = watch
        self._gathered: tuple[Buffer, ...] = ()
        self._flight: _Flight | None = None
        self._arrived: _Arrived | None = None
        self._kept: _Kept | None = None
        self._made: _Made | None = None

    @property
    def _cut(self) -> Cut:
        cut = self._record.cut
        assert cut.dim == 0, "a tensor that gathers itself is cut on dim 0"
        return cut

    @property
    def is_unread(self) -> bool:
        """Unknown: what a subclass's whole tensor shares its memory with is its own affair."""
        return False

    @property
    def is_viewed(self) -> bool:
        """Unknown, likewise."""
        return False

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward will bring a gradient for the parameter."""
        made = self._made
        return made is not None and made.parameter.requires_grad and will_get_gradient(made.parameter)

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the unsharded parameter itself, not a view of it."""
        return self._made is not None and tensor is self._made.parameter

    def end_backward(self) -> None:
        """Nothing to do: it is never taken for unread."""

    def bump_versions(self) -> None:
        """Nothing to do: what was gathered for an earlier forward keeps its own memory."""

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Everything whose memory is in its hands now, as far as the subclass has told us what that is."""
        yield MemoryKind.SHARDS, self.group.shard_buffer
        for buffer in (*self._gathered, *(self._made.inner if self._made is not None else ())):
            yield MemoryKind.UNSHARDED, buffer.tensor
        for part in self._kept.parts if self._kept is not None else ():
            yield MemoryKind.PART, part

    def part_bytes(self, size: int) -> int:
        """Bytes of the part kept for a mesh of `size` ranks; 0 before the first gather, which tells what there is."""
        return sum(buffer.tensor.numel() // size * buffer.tensor.element_size() for buffer in self._gathered)

    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Start the all-gathers, from the shard or from the part that was kept; which dtype they have is the subclass's
        own affair."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self._send(self.group.mesh.transport_of(kept.group), kept.parts, kept.group.size(), kept.terms)
        else:
            self._gather_shard(transport)
        self.move(Live.GATHERING)

    def _gather_shard(self, transport: Transport) -> None:
        """Ask the subclass what to send, and start sending it."""
        group = self.group
        tensors, metadata = self._ask(group.place.fetch(self._record.local, group.device))
        padded = tuple(self._padded(tensor) for tensor in tensors)
        sources = tuple(tensor.contiguous().view(-1) for tensor in padded)
        if not self._gathered:
            ranks = group.packing.num_ranks
            self._gathered = tuple(Buffer(ranks * each.numel(), each.dtype, group.device) for each in sources)
        terms = _Terms(tuple(tensor.shape for tensor in padded), metadata)
        self._send(transport, sources, group.packing.num_ranks, terms)

    def _send(self, transport: Transport, sources: tuple[torch.Tensor, ...], num_ranks: int, terms: _Terms) -> None:
        # The buffers are compute's memory, and so are the sources: the subclass's tensors, or parts that were kept.
        self._streams.gather.follow_compute()
        handoffs = []
        for buffer, source in zip(self._gathered, sources, strict=True):
            buffer.allocate()
            handoffs.append(self._streams.gather.run(_sender(transport, buffer.tensor, source, num_ranks)))
        self._flight = _Flight(tuple(handoffs), sources, terms)

    def _ask(self, local: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Call `fsdp_pre_all_gather` with as many arguments as it takes: an older form takes the mesh alone."""
        mesh = self.group.mesh.shard_mesh
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1:
            tensors, metadata = local.fsdp_pre_all_gather(mesh)
        else:
            shape = self._record.shape
            stride = torch.empty(shape, device="meta").stride()
            tensors, metadata = local.fsdp_pre_all_gather(mesh, shape, stride, self._record.holder(), self._precision)
        return tuple(tensors), metadata

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank must send as much as the one that holds most rows."""
        cut = self._cut
        most = max(rows.numel for rows in cut.rows)
        held = cut.rows[self.group.mesh.piece].numel
        if held == most or tensor.shape[:1] != (held,):
            return tensor
        unsharded = tensor.new_zeros((most, *tensor.shape[1:]))
        unsharded[:held] = tensor
        return unsharded

    def _trimmed(self, by_rank: torch.Tensor) -> torch.Tensor:
        """All ranks' pieces one after the other, without the rows that `_padded` added at the end."""
        pieces = by_rank.flatten(0, 1) if by_rank.dim() > 1 else by_rank
        most = max(rows.numel for rows in self._cut.rows)
        return pieces[: self._record.shape[0]] if by_rank.shape[1:2] == (most,) else pieces

    def wait(self) -> None:
        """Have the subclass make the unsharded parameter, and show it."""
        flight = self._flight
        assert flight is not None, "an all-gather is waited for once it was started"
        for handoff in flight.handoffs:
            handoff.wait()
        gathered = tuple(
            self._trimmed(buffer.tensor.view(self.group.packing.num_ranks, *shape))
            for buffer, shape in zip(self._gathered, flight.terms.shapes, strict=True)
        )
        self._flight, self._arrived = None, _Arrived(flight.terms, self._versions())
        if self._made is None:
            self._made = self._make(gathered, flight.terms.metadata)
            for buffer in (*self._gathered, *self._made.inner):
                saved.watch(buffer.tensor.untyped_storage(), self)
        else:
            for buffer in self._made.inner:
                buffer.allocate()
            self._finish(gathered, flight.terms.metadata, out=self._made.tensor)
        self.move(Live.UNSHARDED)
        self._made.guard.take_down()
        parameter = self._made.parameter
        if parameter.requires_grad != self._record.requires_grad:
            parameter.requires_grad_(self._record.requires_grad)
        self._record.show(parameter)

    def _versions(self) -> tuple[int, ...]:
        return tuple(buffer.tensor._version for buffer in self._gathered)

    def _make(self, gathered: tuple[torch.Tensor, ...], metadata: Any) -> _Made:
        with torch.inference_mode(False):
            unsharded, inner = self._finish(gathered, metadata)
            shape = self._record.shape
            if unsharded.shape != shape:  # padded rows at the end
                unsharded = torch.as_strided(unsharded, shape, torch.empty(shape, device="meta").stride(), 0)
            # From `.data`: with a version counter of its own, which refilling `unsharded` leaves alone (weights.py).
            shown, spec = unsharded.data, self._record.unsharded_spec
            if spec is not None:
                shown = dtensor(shown, dtensor_spec(spec.mesh, spec.placements, spec.shape, unsharded.dtype))
            parameter = nn.Parameter(shown, requires_grad=self._record.requires_grad)
        self._record.share_attributes(parameter)
        self._record.claim(parameter)
        self._watch(0, parameter)
        return _Made(parameter, unsharded, tuple(Buffer.of(tensor) for tensor in inner), Guard([parameter]))

    def _finish(self, gathered: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor) -> Any:
        local: Any = self._record.local
        return local.fsdp_post_all_gather(gathered, metadata, self.group.compute_dtype, **out)

    def free(self) -> None:
        """Show the shard again and give the memory back, whatever the state."""
        if self.live is not Live.SHARDED:
            self._kept = None
            self._let_go()
            self.move(Live.SHARDED)

    def shrink(self, size: int) -> None:
        """Show the shard again, and keep this rank's part of what was gathered for a mesh of `size` ranks.

        Not of buffers that the subclass has written to since: they are gathered from all ranks again.
        """
        arrived, mesh = self._arrived, self.group.mesh
        assert arrived is not None, "only what was gathered is shrunk"
        if arrived.versions == self._versions():
            parts = tuple(_part(buffer.tensor, size, mesh.shard_rank % size) for buffer in self._gathered)
            self._kept = _Kept(parts, mesh.smaller_group(size), arrived.terms)
        self._let_go()
        self.move(Live.SHRUNK)

    def _let_go(self) -> None:
        self._record.show(self._record.shard)
        if self._flight is not None:
            for handoff in self._flight.handoffs:
                handoff.wait()
            self._flight = None
        self._arrived = None
        if self._made is not None:
            self._made.guard.raise_up()
        for buffer in (*self._gathered, *(self._made.inner if self._made is not None else ())):
            buffer.free()


def _sender(
    transport: Transport, output: torch.Tensor, source: torch.Tensor, num_ranks: int
) -> Callable[[bool], Pending | None]:
    return lambda async_op: transport.all_gather(output, source, (source.numel(),) * num_ranks, async_op)


def _part(gathered: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The part of `gathered`, 1-D, that `rank` of `size` keeps."""
    numel = gathered.numel() // size
    return gathered[rank * numel : (rank + 1) * numel].clone()


def require_can_gather_itself(name: str, tensor: torch.Tensor, cut: Cut, mesh: DataMesh) -> None:
    """Raise `PlacementError` for a tensor with its own all-gather that is not cut as that needs it."""
    if not hasattr(tensor, "fsdp_pre_all_gather"):
        return
    if mesh.shards_replicas:
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} gathers itself, from whole shards, and replicas that own pieces of a "
            "shard have none; let replicas be copies (placements='hsdp') in its unit"
        )
    if cut.dim != 0:
        how = "into runs" if cut.in_line else f"on dim {cut.dim}"
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} gathers itself and is cut on dim 0 only, not {how}; let "
            "shard_placement_fn return Shard(0) for it"
        )
