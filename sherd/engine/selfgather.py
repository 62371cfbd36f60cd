"""Weights of one parameter whose tensor subclass brings its own all-gather: what is sent, and what becomes of it.

The protocol is torch's, as fp8, int8 and NF4 tensors implement it on the shard's local tensor:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype)                    -> (whole tensor, tensors to free with it)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=whole tensor)  -> None, the second time and later
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sherd.comm.buffers import Buffer
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import Pending, Transport
from sherd.engine.group import Group
from sherd.engine.weights import Position
from sherd.errors import PlacementError
from sherd.layout.placement import Cut
from sherd.policy import MixedPrecisionPolicy
from sherd.schedule.forecast import Kind
from sherd.schedule.state import Live


@dataclass(frozen=True, slots=True)
class _Flight:
    """All-gathers under way, one for each tensor that the subclass asked to send."""

    handoffs: tuple[Handoff, ...]
    sources: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]
    metadata: Any


@dataclass(frozen=True, slots=True)
class _Made:
    """The whole parameter, and the tensors whose memory goes when it does."""

    parameter: nn.Parameter
    tensor: torch.Tensor
    inner: tuple[Buffer, ...]


class SelfGatheredWeights:
    """The weights of a group of one such parameter; to the unit it is like any other group's."""

    def __init__(
        self,
        group: Group,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        watch: Callable[[int, nn.Parameter], None],
    ) -> None:
        self.group = group
        (self._record,) = group.parameters
        self._position = Position(group.name)
        self._streams = streams
        self._precision = precision
        self._watch = watch
        self._gathered: tuple[Buffer, ...] = ()
        self._flight: _Flight | None = None
        self._made: _Made | None = None

    @property
    def _cut(self) -> Cut:
        assert isinstance(self._record.cut, Cut), "a tensor that gathers itself is cut on a dim"
        return self._record.cut

    @property
    def live(self) -> Live:
        """Where the parameter is."""
        return self._position.live

    @property
    def is_unread(self) -> bool:
        """Unknown: what a subclass's whole tensor shares its memory with is its own affair."""
        return False

    def outdate(self) -> None:
        """Nothing to do: what was gathered for an earlier forward keeps its own memory."""

    def held(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Everything whose memory is in its hands now, as far as the subclass has told us what that is."""
        yield Kind.SHARDS, self.group.rest
        for buffer in (*self._gathered, *(self._made.inner if self._made is not None else ())):
            yield Kind.WHOLE, buffer.tensor

    @torch.no_grad()
    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Ask the subclass what to send, and start sending it; which dtype that has is its own affair."""
        group = self.group
        tensors, metadata = self._ask(group.place.fetch(self._record.local, group.device))
        padded = tuple(self._padded(tensor) for tensor in tensors)
        sources = tuple(tensor.contiguous().view(-1) for tensor in padded)
        if not self._gathered:
            ranks = group.packing.num_ranks
            self._gathered = tuple(Buffer(ranks * each.numel(), each.dtype, group.device) for each in sources)
        # The buffers are compute's memory, and the subclass's tensors have just been made there.
        self._streams.gather.follow_compute()
        handoffs = []
        for buffer, source in zip(self._gathered, sources, strict=True):
            buffer.allocate()
            handoffs.append(
                self._streams.gather.run(_sender(transport, buffer.tensor, source, group.packing.num_ranks))
            )
        shapes = tuple(tensor.shape for tensor in padded)
        self._flight = _Flight(tuple(handoffs), sources, shapes, metadata)
        self._position.move(Live.GATHERING)

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
        if cut.dim != 0:
            raise PlacementError(
                f"{self._record.name}: a tensor subclass with its own all-gather "
                f"({type(self._record.local).__name__}) is cut "
                f"on dim 0 only, not on {cut.dim}"
            )
        held = cut.rows[self.group.mesh.shard_rank].numel
        if held == most or tensor.shape[:1] != (held,):
            return tensor
        whole = tensor.new_zeros((most, *tensor.shape[1:]))
        whole[:held] = tensor
        return whole

    def _trimmed(self, by_rank: torch.Tensor) -> torch.Tensor:
        """All ranks' pieces one after the other, without the rows that `_padded` added at the end."""
        pieces = by_rank.flatten(0, 1) if by_rank.dim() > 1 else by_rank
        most = max(rows.numel for rows in self._cut.rows)
        return pieces[: self._record.shape[0]] if by_rank.shape[1:2] == (most,) else pieces

    @torch.no_grad()
    def wait(self) -> None:
        """Have the subclass make the whole parameter, and show it."""
        flight = self._flight
        assert flight is not None, "an all-gather is waited for once it was started"
        for handoff in flight.handoffs:
            handoff.wait()
        gathered = tuple(
            self._trimmed(buffer.tensor.view(self.group.packing.num_ranks, *shape))
            for buffer, shape in zip(self._gathered, flight.shapes, strict=True)
        )
        self._flight = None
        if self._made is None:
            self._made = self._make(gathered, flight.metadata)
        else:
            for buffer in self._made.inner:
                buffer.allocate()
            self._finish(gathered, flight.metadata, out=self._made.tensor)
        self._position.move(Live.WHOLE)
        parameter = self._made.parameter
        if parameter.requires_grad != self._record.requires_grad:
            parameter.requires_grad_(self._record.requires_grad)
        self._record.show(parameter)

    def _make(self, gathered: tuple[torch.Tensor, ...], metadata: Any) -> _Made:
        with torch.inference_mode(False):
            whole, inner = self._finish(gathered, metadata)
            shape = self._record.shape
            if whole.shape != shape:  # padded rows at the end
                whole = torch.as_strided(whole, shape, torch.empty(shape, device="meta").stride(), 0)
            # From `.data`: with a version counter of its own, which refilling `whole` leaves alone (weights.py).
            parameter = nn.Parameter(whole.data, requires_grad=self._record.requires_grad)
        self._record.claim(parameter)
        self._watch(0, parameter)
        return _Made(parameter, whole, tuple(Buffer.of(tensor) for tensor in inner))

    def _finish(self, gathered: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor) -> Any:
        local: Any = self._record.local
        return local.fsdp_post_all_gather(gathered, metadata, self.group.compute_dtype, **out)

    @torch.no_grad()
    def free(self) -> None:
        """Show the shard again and give the memory back, whatever the state."""
        if self.live is not Live.SHARDED:
            self._let_go()
            self._position.move(Live.SHARDED)

    @torch.no_grad()
    def shrink(self, size: int) -> None:
        """Show the shard again. What was gathered is the subclass's own affair, so no part of it can be kept."""
        self._let_go()
        self._position.move(Live.SHRUNK)

    def _let_go(self) -> None:
        self._record.show(self._record.shard)
        if self._flight is not None:
            for handoff in self._flight.handoffs:
                handoff.wait()
            self._flight = None
        for buffer in (*self._gathered, *(self._made.inner if self._made is not None else ())):
            buffer.free()


def _sender(
    transport: Transport, output: torch.Tensor, source: torch.Tensor, num_ranks: int
) -> Callable[[bool], Pending | None]:
    return lambda async_op: transport.all_gather(output, source, (source.numel(),) * num_ranks, async_op)
