"""The weights of one parameter whose tensor subclass says what is gathered, and makes the unsharded tensor of it.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sherd._torch import dtensor, dtensor_spec
from sherd.comm.buffers import Buffer
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.comm.transport import Transport
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.unsharded_buffer import Unsharded
from sherd.engine.moves.weights import Flight, Weights
from sherd.engine.state.group import Group
from sherd.errors import PlacementError
from sherd.layout.placement import Cut
from sherd.policy import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class _Terms:
    """The shape of each tensor that a rank sends, and what the subclass wants to know when all have come."""

    shapes: tuple[torch.Size, ...]
    metadata: Any


class _Unsharded(Unsharded):
    """The gathered buffers, and the unsharded `tensor` that the subclass makes of them at the first gather."""

    tensor: torch.Tensor | None = None

    def keep(self, tensor: torch.Tensor, inner: tuple[torch.Tensor, ...], parameter: nn.Parameter) -> None:
        """Have `tensor`, whose memory is that of `inner`, from now on."""
        self.tensor = tensor
        self.buffers = (*self.gathered, *map(Buffer.of, inner))
        self.parameters = [parameter]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each gathered buffer: the subclass may write in them."""
        return tuple(buffer.tensor._version for buffer in self.gathered)


class SelfGatheredWeights(Weights):
    """The weights of a group of one such parameter, whose views and dtype only the subclass knows."""

    made: _Unsharded | None

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        super().__init__(group, plan, streams, watch, unshard)
        (self._record,) = group.parameters
        self._precision = precision
        self._terms: _Terms | None = None
        self._arrived: tuple[int, ...] = ()  # the versions of the gathered buffers when all had come

    @property
    def _cut(self) -> Cut:
        cut = self._record.cut
        assert cut.dim == 0, "a tensor that gathers itself is cut on dim 0"
        return cut

    @property
    def is_unread(self) -> bool:
        """Returns False: what a subclass's unsharded tensor shares its memory with is its own affair."""
        return False

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all that the subclass has told us of; of the parameter before the first gather."""
        known = sum(buffer.tensor.nbytes for buffer in self.made.buffers) if self.made is not None else 0
        return max(super().unsharded_bytes, known)

    def part_bytes(self, size: int) -> int:
        """Returns the bytes of the part kept for a mesh of `size` ranks; 0 before the first gather, which tells what
        there is."""
        gathered = self.made.gathered if self.made is not None else ()
        return sum(buffer.tensor.numel() // size * buffer.tensor.element_size() for buffer in gathered)

    def _gather_shards(self, transport: Transport, full_precision: bool) -> None:
        """Ask the subclass what to send, and start sending it. Which dtype it has is the subclass's own affair."""
        group, num_ranks = self.group, self.group.packing.num_ranks
        tensors, metadata = self._ask(group.place.fetch(self._record.local, group.device))
        padded = tuple(self._padded(tensor) for tensor in tensors)
        sources = tuple(tensor.contiguous().view(-1) for tensor in padded)
        if self.made is None:
            buffers = tuple(Buffer(num_ranks * each.numel(), each.dtype, group.device) for each in sources)
            self.made = _Unsharded(group.parameters, buffers)
        self._terms = _Terms(tuple(tensor.shape for tensor in padded), metadata)
        self._flight = Flight(self._gather_into_buffers(transport, sources, num_ranks), (), group.version)

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
        """Returns `tensor` with as many rows as the rank that holds most: all ranks must send equally much."""
        cut = self._cut
        most = max(rows.numel for rows in cut.rows)
        held = cut.rows[self.group.mesh.piece].numel
        if held == most or tensor.shape[:1] != (held,):
            return tensor
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[:held] = tensor
        return padded

    def _trimmed(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' pieces one after the other, without the rows that `_padded` added at the end."""
        pieces = by_rank.flatten(0, 1) if by_rank.dim() > 1 else by_rank
        most = max(rows.numel for rows in self._cut.rows)
        return pieces[: self._record.shape[0]] if by_rank.shape[1:2] == (most,) else pieces

    def _land(self, flight: Flight) -> None:
        """Have the subclass make the unsharded parameter of what has come."""
        flight.handoff.wait()
        made, terms = self.made, self._terms
        assert made is not None and terms is not None, "an all-gather is waited for once it was started"
        gathered = tuple(
            self._trimmed(buffer.tensor.view(self.group.packing.num_ranks, *shape))
            for buffer, shape in zip(made.gathered, terms.shapes, strict=True)
        )
        self._arrived = made.versions
        if made.tensor is not None:
            for buffer in made.buffers:
                buffer.allocate()
            self._finish(gathered, terms.metadata, out=made.tensor)
            return
        with torch.inference_mode(False):
            unsharded, inner = self._finish(gathered, terms.metadata)
            shape = self._record.shape
            if unsharded.shape != shape:  # padded rows at the end
                unsharded = torch.as_strided(unsharded, shape, torch.empty(shape, device="meta").stride(), 0)
            # From `.data`: with a version counter of its own, which refilling `unsharded` leaves alone (weights.py).
            shown, spec = unsharded.data, self._record.unsharded_spec
            if spec is not None:
                shown = dtensor(shown, dtensor_spec(spec.mesh, spec.placements, spec.shape, unsharded.dtype))
            made.keep(unsharded, inner, nn.Parameter(shown, requires_grad=self._record.requires_grad))
        self._adopt(0, *made.parameters)
        for buffer in made.buffers:
            saved.watch(buffer.tensor.untyped_storage(), self)

    def _finish(self, gathered: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor) -> Any:
        local: Any = self._record.local
        return local.fsdp_post_all_gather(gathered, metadata, self.group.compute_dtype, **out)

    @property
    def _may_keep_part(self) -> bool:
        """Whether the subclass has not written to what it was given."""
        return self.made is not None and self._arrived == self.made.versions

    def free(self) -> None:
        """Show the shard again and give the memory back, whatever the state."""
        super().free()
        self._terms = None


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
