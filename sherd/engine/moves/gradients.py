"""A group's gradients from whole to shard: collected, reduced over the ranks, added to the shards' `.grad`.

Each gradient is copied once at most: from where autograd left it into the rows that the reduce-scatter sends, in the
reduce dtype, and dropped. A tensor that has a group to itself is sent from where it is. With 2 ranks and two tensors (a
2x2, b 2):

    rank 0: a.grad [[1 2] [3 4]]  b.grad [5 6]    rows  | 1 2 | 5 |    its shards get | (1+1)/2 (2+1)/2 | (5+3)/2 |
                                                        | 3 4 | 6 |
    rank 1: a.grad [[1 1] [1 1]]  b.grad [3 3]    rows  | 1 1 | 3 |    its shards get | (3+1)/2 (4+1)/2 | (6+3)/2 |
                                                        | 1 1 | 3 |

Without a reduction (`set_requires_gradient_sync(False)`) the rows stay and the next backward adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from sherd.comm.streams import Handoff, Lane, Streams
from sherd.comm.transport import Pending, Transport, parts
from sherd.engine.moves.arrivals import Arrivals
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.reduce_buffer import ReduceBuffer
from sherd.engine.moves.scale import Scale, add_earlier
from sherd.engine.moves.shard_gradients import ShardGradients
from sherd.engine.state.group import Group
from sherd.policy import UnitPolicy
from sherd.schedule.moments import MemoryKind


@dataclass(eq=False, slots=True)
class _Reduction:
    """A reduction under way. `partial`: over the shard axis only; the replicas will be summed another time. `rows` have
    been given back already if a lane owns them. `lands`: what is `reduced` is on its way to host memory.

    `sources` are what is sent, what is summed over the replicas, and what earlier backwards left to it; held until
    compute has waited for the lane that reads them, or the reduce lane could hand their memory out again.
    """

    handoff: Handoff
    rows: ReduceBuffer
    reduced: torch.Tensor
    with_gradient: frozenset[int]
    scale: Scale
    partial: bool
    lands: bool
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Landing:
    """A mean on its way to host memory, where it is once `handoff` says so. `source`, which is copied, is held till
    then if compute owns it."""

    handoff: Handoff
    stored: torch.Tensor
    with_gradient: frozenset[int]
    source: torch.Tensor | None = None


class Gradients:
    """One group's gradients: `arrivals` that no reduction has taken yet; `partial`, a sum over the shard axis alone,
    which waits for the replicas'; and those in a reduction that is under way.

    `begin()` is called when a gradient comes though nobody has said that a backward has begun, `complete()` when every
    trainable parameter has had its gradient.
    """

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        begin: Callable[[], None],
        complete: Callable[[], None],
    ) -> None:
        self.group = group
        self._plan = plan
        self.arrivals = Arrivals(group, plan, streams.reduce, begin, complete)
        self._streams = streams
        self._shards = ShardGradients(group)
        self._reduction: _Reduction | None = None
        self.partial: torch.Tensor | None = None
        self._partly_reduced: frozenset[int] = frozenset()
        self._landings: list[_Landing] = []

    def may_lack(self, policy: UnitPolicy) -> bool:
        """Returns whether ranks that have no gradients take part in the reduction of those that others have."""
        return (policy.reduce_unused or self.group.num_flags > 0) and self.arrivals.num_expected > 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""
        return self._reduction is not None

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields everything whose memory is in its hands now, freed buffers too: what a memory report counts."""
        yield from self.arrivals.held()
        if self._reduction is not None:
            yield MemoryKind.GRADIENT_ROWS, self._reduction.rows.buffer.tensor
            yield MemoryKind.REDUCED, self._reduction.reduced
            for source in self._reduction.sources:
                yield MemoryKind.REDUCED, source
        for landing in self._landings:
            yield MemoryKind.REDUCED, landing.stored
        if self.partial is not None:
            yield MemoryKind.REDUCED, self.partial

    # Reducing

    def collect(self) -> None:
        """Copy what waits into the rows, where the reduce lane owns these."""
        if self._plan.lane_owns_rows:
            self.arrivals.collect()

    def reduce(self, policy: UnitPolicy, transport: Transport) -> None:
        """Start the reduction of what was collected: over the shard axis, and over the replicas if `policy` says so."""
        awaits_replicas = self.partial is not None and policy.all_reduce_gradients  # of earlier backwards
        rows = self.arrivals.take(even_if_empty=awaits_replicas or self.may_lack(policy))
        if rows is None:
            return
        group, mesh = self.group, self.group.mesh
        rows.complete()
        sizes = self._plan.reduced_by_rank
        result: list[torch.Tensor] = []
        sent = rows.buffer.tensor.to(group.reduce_dtype)  # itself, unless many were added up in it

        def scatter(async_op: bool) -> Pending | None:
            dtype = transport.sum_dtype(group.reduce_dtype)
            reduced = transport.empty(sizes[mesh.shard_rank], dtype, group.device)
            result.append(reduced)
            return transport.reduce_scatter(reduced, sent, sizes, async_op)

        # Whoever owns the rows, compute has just written them.
        self._streams.reduce.follow_compute()
        handoff = self._streams.reduce.run(scatter)
        (reduced,) = result
        replicated = mesh.num_replicas > 1
        is_lanes = self._plan.lane_owns_rows and sent is rows.buffer.tensor
        sources = [] if is_lanes else [sent]
        if replicated and policy.all_reduce_gradients:
            earlier, self.partial = self.partial, None
            sources += [reduced] if earlier is None else [reduced, earlier]
            if mesh.shards_replicas:
                reduced, handoff = self._reduce_pieces(reduced, earlier, handoff)
            else:
                handoff = self._all_reduce(reduced, earlier, handoff, policy.all_reduce)
        used = frozenset(range(len(group.parameters))) if policy.reduce_unused else frozenset(rows.filled)
        is_partial = replicated and not policy.all_reduce_gradients
        self._reduction = _Reduction(handoff, rows, reduced, used, self.arrivals.scale, is_partial, False, sources)
        if self._plan.lane_owns_rows:
            self.arrivals.give_back(rows)
        if group.is_offloaded and not is_partial and policy.all_reduce_hook is None:
            self._send_to_host(self._reduction)

    def _send_to_host(self, reduction: _Reduction) -> None:
        """Copy the mean to host memory behind the reduction, on the lane that made the sum and gets its memory back."""
        lane = self._streams.reduce if self.group.mesh.num_replicas == 1 else self._streams.all_reduce
        mean = partial(self._as_gradient, reduction.reduced, reduction.scale)
        stored, handoff = self._store(mean, lane, reduction.handoff)
        self._reduction = replace(reduction, handoff=handoff, reduced=stored, lands=True)

    def _store(
        self, mean: Callable[[], torch.Tensor], lane: Lane, after: Handoff | None = None
    ) -> tuple[torch.Tensor, Handoff]:
        """Copy `mean()` to host memory, on `lane`. Returns the copy, and when it is there."""
        stored: list[torch.Tensor] = []
        handoff = lane.run(lambda async_op: stored.append(self.group.place.store(mean())), after)
        return stored[0], handoff

    def _all_reduce(
        self,
        reduced: torch.Tensor,
        earlier: torch.Tensor | None,
        scattered: Handoff,
        user: Callable[[torch.Tensor], None] | None,
    ) -> Handoff:
        """Sum over the replicas, with what earlier backwards left to this one."""

        def run(async_op: bool) -> Pending | None:
            add_earlier(reduced, earlier)
            if user is not None:
                user(reduced)
                return None
            return self.group.mesh.replicate_transport.all_reduce(reduced, async_op)

        return self._streams.all_reduce.run(run, after=scattered)

    def _reduce_pieces(
        self, reduced: torch.Tensor, earlier: torch.Tensor | None, scattered: Handoff
    ) -> tuple[torch.Tensor, Handoff]:
        """Sum over the replicas where each of them owns a piece of the shard, and gets the sum of that only."""
        mesh = self.group.mesh
        transport = mesh.replicate_transport
        result: list[torch.Tensor] = []

        def run(async_op: bool) -> Pending | None:
            add_earlier(reduced, earlier)
            own = self._plan.reduced_by_piece.of(mesh.pieces_of(mesh.shard_rank))
            result.append(transport.empty(own[mesh.replica], transport.sum_dtype(reduced.dtype), reduced.device))
            return transport.reduce_scatter(result[0], reduced, own, async_op)

        handoff = self._streams.all_reduce.run(run, after=scattered)
        return result[0], handoff

    def finish_reduce(self, policy: UnitPolicy) -> None:
        """Order compute after the reduction, add its result to the shards' gradients, free the rows."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        if not reduction.lands or reduction.sources:
            reduction.handoff.wait()
        if not self._plan.lane_owns_rows:
            self.arrivals.give_back(reduction.rows)
        reduced, with_gradient, scale = reduction.reduced, reduction.with_gradient, reduction.scale
        if reduction.partial:
            self.partial = reduced.to(self.arrivals.summed_in) if self.partial is None else self.partial.add_(reduced)
            self._partly_reduced |= with_gradient
            return
        with_gradient, self._partly_reduced = with_gradient | self._partly_reduced, frozenset()
        if reduction.lands:
            self._landings.append(_Landing(reduction.handoff, reduced, with_gradient))
            return
        del reduction  # and with it borrowed rows, and the sum in another dtype, before more memory is taken
        if scale.after != 1.0 or reduced.dtype != self.group.grad_dtype:
            reduced = self._as_gradient(reduced, scale)
        if policy.all_reduce_hook is not None:
            self._run_hook(policy, reduced)
        if self.group.is_offloaded:
            self._streams.reduce.follow_compute()
            stored, handoff = self._store(lambda: reduced, self._streams.reduce)
            self._landings.append(_Landing(handoff, stored, with_gradient, reduced))
            return
        if len(with_gradient) < len(self.group.parameters):
            with_gradient = self._anywhere(reduced, with_gradient)
        self._shards.give(reduced, with_gradient)

    def land(self) -> None:
        """Wait for what is on its way to host memory, and add it to the shards' gradients, which an optimizer will read
        there."""
        landings, self._landings = self._landings, []
        for landing in landings:
            landing.handoff.wait_on_host()
            self._shards.give(landing.stored, self._anywhere(landing.stored, landing.with_gradient))

    def _as_gradient(self, reduced: torch.Tensor, scale: Scale) -> torch.Tensor:
        """Returns the mean in the gradient's dtype."""
        dtype = self.group.grad_dtype
        if scale.after != 1.0:
            reduced = reduced.to(dtype) if dtype.itemsize > reduced.itemsize else reduced
            reduced.mul_(scale.after)
        return reduced.to(dtype)

    def _anywhere(self, reduced: torch.Tensor, here: frozenset[int]) -> frozenset[int]:
        """Returns the trainable parameters that have a gradient `here` or on another rank."""
        flags = reduced[self.group.shard_numel :]
        missing = [i for i, each in enumerate(self.group.parameters) if i not in here and each.requires_grad]
        if not missing or not self.group.num_flags:
            return here
        # Read by the host, which waits for it on an accelerator: only in steps where something is missing.
        values = flags.tolist()
        return here.union(index for index in missing if values[index] != 0)

    def _run_hook(self, policy: UnitPolicy, reduced: torch.Tensor) -> None:
        reduced = reduced[: self.group.shard_numel]
        hook, stream = policy.all_reduce_hook, policy.all_reduce_hook_stream
        assert hook is not None, "called only when there is a hook"
        if stream is None:
            hook(reduced)
        else:
            self._streams.run_beside(stream, lambda: hook(reduced))

    # Giving up

    def drop_unreduced(self) -> None:
        """Drop what was collected and given to no reduction (`no_sync`), or to half of one."""
        self.arrivals.drop()
        self.partial = None
        self._partly_reduced = frozenset()

    def drop_unreduced_of(self, indices: frozenset[int]) -> None:
        """Drop those of the parameters of these indices."""
        if len(indices) == len(self.group.parameters):
            self.drop_unreduced()
            return
        self.arrivals.drop_of(indices)
        if self.partial is not None:
            self._zero(self.partial, indices)
            self._partly_reduced -= indices

    @torch.no_grad()
    def _zero(self, partial: torch.Tensor, indices: frozenset[int]) -> None:
        """Zero what a sum over the shard axis has of these parameters, and their flags."""
        group, mesh = self.group, self.group.mesh
        pieces = mesh.pieces_of(mesh.shard_rank)
        for piece, part in zip(pieces, parts(partial, self._plan.reduced_by_piece.of(pieces)), strict=True):
            for index in indices:
                held = group.packing.slots[index].held(piece)
                part[held.start : held.stop].zero_()
                part[group.packing.shard_numels[piece] + index] = 0

    def discard(self) -> None:
        """Drop everything that has not reached the shards."""
        if self._reduction is not None:
            self._reduction.handoff.wait()
            if not self._plan.lane_owns_rows:
                self.arrivals.give_back(self._reduction.rows)
            self._reduction = None
        for landing in self._landings:
            landing.handoff.wait_on_host()
        self._landings.clear()
        self.drop_unreduced()
