"""A group's gradients from unsharded to shard: collected, reduced over the ranks, added to the shards' `.grad`.

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
from functools import partial, reduce
from itertools import chain, starmap
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    DTensorSpec,
    after_accumulation_hooks,
    gradient_hooks,
    hooks_on_gradient,
    local_tensor,
    new_dtensor,
)
from sherd.comm.streams import CommStream, Handoff, Streams
from sherd.comm.transport import Pending, Transport, parts
from sherd.engine.moves.arrivals import Arrivals, ReduceBuffer
from sherd.engine.moves.buffer_plan import BufferPlan, Scale
from sherd.engine.state.flat import FlatParameter, note_gradients
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, as_sharded
from sherd.errors import GradientError, PolicyError
from sherd.policy import UnitPolicy
from sherd.schedule.moments import MemoryKind
from sherd.tensor.ragged import RaggedDTensor, as_dtensor


def _changed_by_hook(name: str, hook: Callable[[Any], Any], term: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns the reduced gradient as a user's hook (`register_hook`) changes it."""
    changed = hook(as_dtensor(term, spec))
    if changed is None:
        return term
    if not isinstance(changed, DTensor):
        raise GradientError(
            f"{name}: a hook on its gradient returned a {type(changed).__name__}; the gradient that it was given is a "
            "DTensor, this rank's part of the reduced one, and so must be what it returns"
        )
    if changed.placements != spec.placements:
        changed = changed.redistribute(placements=spec.placements)
    return local_tensor(changed).contiguous()


def _laid_out(gradient: DTensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    from sherd.tensor.relayout import laid_out, lies_as  # seldom needed, so loaded late: tests/test_storeys.py

    return gradient if lies_as(gradient, spec) else laid_out(gradient, spec, device)


def _form_of(record: ShardedParameter, dtype: torch.dtype) -> tuple[type[DTensor], DTensorSpec]:
    spec = record.gradient_spec(dtype)
    return type(as_sharded(record.optimizer_param)) if record.gradient_owner is None else RaggedDTensor, spec


@dataclass(eq=False, slots=True)
class _Reduction:
    handoff: Handoff
    rows: ReduceBuffer  # returned already if a lane owns them
    reduced: torch.Tensor
    with_gradient: frozenset[int]
    scale: Scale
    partial: bool  # over the shard axis only: a later reduction sums over the replicas
    to_host: bool  # `reduced` is a copy in host memory, complete once `handoff` says so
    # What is sent, what is summed over the replicas, and what earlier backwards left. Held until compute has waited for
    # the lane that reads them, or the lane could hand out their memory again.
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A mean on its way to host memory. `source`, if compute owns its memory, is held until the copy is complete."""

    handoff: Handoff
    stored: torch.Tensor
    with_gradient: frozenset[int]
    source: torch.Tensor | None = None


class Gradients:
    """One group's gradients, from autograd to the shards' `.grad`.

    `begin()` is called when a gradient comes before a backward was announced, `complete()` when every
    trainable parameter has its gradient.
    """

    def __init__(
        self, group: Group, plan: BufferPlan, streams: Streams, begin: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        self.group = group
        self._plan = plan
        self.arrivals = Arrivals(group, plan, streams.reduce, begin, complete)
        self._streams = streams
        self._reduction: _Reduction | None = None
        self.partial: torch.Tensor | None = None  # a sum over the shard axis, which waits for that over the replicas
        self._partly_reduced: frozenset[int] = frozenset()
        self._host_copies: list[_HostCopy] = []
        # For `_give`, which every backward calls: a record, a class and spec, and a view of the buffer each.
        params = group.gradients
        self._records = [each.record for each in params]
        self._reduce_dtype, self._grad_dtype = group.reduce_dtype, group.grad_dtype
        self._forms = [_form_of(each.record, group.grad_dtype) for each in params]
        self._flat = flat if isinstance(flat := params[0].parameter, FlatParameter) else None
        strides = [torch.empty(each.shape, device="meta").stride() for each in params]
        self._views = [(each.shape, of_it, each.extent.start) for each, of_it in zip(params, strides, strict=True)]
        self._numel = group.gradient_packing.shard_numels[group.mesh.piece]  # without flags

    def may_lack(self, policy: UnitPolicy) -> bool:
        """Returns whether ranks without gradients take part in a reduction of gradients that others have."""
        return (policy.reduce_unused or self.group.num_flags > 0) and self.arrivals.num_expected > 0

    @property
    def is_in_flight(self) -> bool:
        return self._reduction is not None

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields every buffer, freed ones too: what a memory report counts."""
        yield from self.arrivals.held()
        if self._reduction is not None:
            yield MemoryKind.GRADIENT_ROWS, self._reduction.rows.buffer.tensor
            yield MemoryKind.REDUCED, self._reduction.reduced
            for source in self._reduction.sources:
                yield MemoryKind.REDUCED, source
        for host_copy in self._host_copies:
            yield MemoryKind.REDUCED, host_copy.stored
        if self.partial is not None:
            yield MemoryKind.REDUCED, self.partial

    # Reducing

    def collect(self) -> None:
        """Copy waiting gradients into the rows, if the reduce lane owns the rows."""
        if self._plan.lane_owns_rows:
            self.arrivals.collect()

    def reduce(self, policy: UnitPolicy, transport: Transport) -> None:
        """Start the reduction: over the shard axis, and over the replicas if `policy` says so."""
        awaits_replicas = self.partial is not None and policy.all_reduce_gradients  # of earlier backwards
        rows = self.arrivals.take(even_if_empty=awaits_replicas or self.may_lack(policy))
        if rows is None:
            return
        group, mesh = self.group, self.group.mesh
        if group.takes_any_gradient:
            self._take_dtype_of(rows, policy)
        rows.complete()
        sizes = self._plan.reduced_by_rank
        result: list[torch.Tensor] = []
        sent = rows.buffer.tensor
        sent = sent if sent.dtype == self._reduce_dtype else sent.to(self._reduce_dtype)  # else added wider

        def scatter(async_op: bool) -> Pending | None:
            dtype = transport.sum_dtype(self._reduce_dtype)
            # Inside `scatter`, which runs on the lane: the stream that writes the sum first owns its memory.
            reduced = transport.empty(sizes[mesh.shard_rank], dtype, group.device)
            result.append(reduced)
            return transport.reduce_scatter(reduced, sent, sizes, async_op)

        # Whoever owns the rows, compute has just written them. For `reduced` the lane's pool may hand out the memory of
        # an earlier sum, which compute read last, as a `.grad` that was dropped since.
        self._streams.reduce.follow_compute()
        handoff = self._streams.reduce.run(scatter)
        (reduced,) = result
        replicated = mesh.num_replicas > 1
        is_lanes = self._plan.lane_owns_rows and sent is rows.buffer.tensor
        sources = [] if is_lanes else [sent]
        if replicated and policy.all_reduce_gradients:
            earlier, self.partial = self.partial, None
            sources += [reduced] if earlier is None else [reduced, earlier]
            reduced, handoff = self._sum_over_replicas(reduced, earlier, handoff, policy.all_reduce)
        with_gradient = frozenset(range(len(group.parameters))) if policy.reduce_unused else frozenset(rows.filled)
        is_partial = replicated and not policy.all_reduce_gradients
        scale = self.arrivals.scale
        reduction = _Reduction(handoff, rows, reduced, with_gradient, scale, is_partial, False, sources)
        self._reduction = reduction
        if self._plan.lane_owns_rows:
            # Freed while the reduce-scatter is only queued: the lane's pool gives the memory to later work of the lane.
            self.arrivals.give_back(rows)
        if group.is_offloaded and not is_partial and policy.all_reduce_hook is None:
            # On the lane that made the sum: the memory of the sum goes back to it.
            lane = self._streams.reduce if mesh.num_replicas == 1 else self._streams.all_reduce
            stored, handoff = self._store(partial(self._as_gradient, reduced, scale), lane, handoff)
            self._reduction = replace(reduction, handoff=handoff, reduced=stored, to_host=True)

    def _take_dtype_of(self, rows: ReduceBuffer, policy: UnitPolicy) -> None:
        """Reduce in the dtype of `rows`, in which gradients of any dtype have come.

        Raises:
            PolicyError: ranks without a gradient, which send zeros, would not know the dtype.
        """
        if policy.reduce_unused:
            raise PolicyError(
                f"{self.group.name} has grad_dtype=None, and set_reduce_scatter_unused_params(True) lets ranks without "
                "its gradient send zeros, whose dtype is unknown; give MixedPrecisionPolicy(reduce_dtype=...)"
            )
        earlier = [] if self.partial is None else [self._reduce_dtype]
        self._reduce_dtype = self._grad_dtype = reduce(torch.promote_types, earlier, rows.buffer.tensor.dtype)
        self._forms = [_form_of(record, self._grad_dtype) for record in self._records]

    def _sum_over_replicas(
        self,
        reduced: torch.Tensor,
        earlier: torch.Tensor | None,
        scattered: Handoff,
        user: Callable[[torch.Tensor], None] | None,
    ) -> tuple[torch.Tensor, Handoff]:
        """Sum over the replicas, with the sum that earlier backwards left, once `scattered` is done.

        Returns the sum, and its handoff: of this replica's piece only, where replicas own pieces of the shard.
        """
        mesh, result = self.group.mesh, [reduced]

        def run(async_op: bool) -> Pending | None:
            if earlier is not None:
                # `earlier` is as wide as the shards. It is added in that width, and sent in the reduce dtype.
                reduced.copy_(earlier.add_(reduced))
            if mesh.shards_replicas:
                transport = mesh.replicate_transport
                own = self._plan.reduced_by_piece.of(mesh.pieces_of(mesh.shard_rank))
                result[0] = transport.empty(own[mesh.replica], transport.sum_dtype(reduced.dtype), reduced.device)
                return transport.reduce_scatter(result[0], reduced, own, async_op)
            if user is not None:
                user(reduced)
                return None
            return mesh.replicate_transport.all_reduce(reduced, async_op)

        handoff = self._streams.all_reduce.run(run, after=scattered)
        return result[0], handoff

    def _store(
        self, mean: Callable[[], torch.Tensor], lane: CommStream, after: Handoff | None = None
    ) -> tuple[torch.Tensor, Handoff]:
        """Copy `mean()` to host memory, on `lane`. Returns the copy, and its handoff."""
        stored: list[torch.Tensor] = []
        handoff = lane.run(lambda async_op: stored.append(self.group.place.store(mean())), after)
        return stored[0], handoff

    def finish_reduce(self, policy: UnitPolicy) -> None:
        """Order compute after the reduction, add the result to the shards' gradients, free the rows."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        # Compute does not read a sum that goes to the host; `land` waits for the sum. Sources belong to compute or to
        # another lane than the one that reads them, so they stay until compute has waited.
        if not reduction.to_host or reduction.sources:
            reduction.handoff.wait()
        if not self._plan.lane_owns_rows:
            self.arrivals.give_back(reduction.rows)
        reduced, with_gradient, scale = reduction.reduced, reduction.with_gradient, reduction.scale
        if reduction.partial:
            self.partial = reduced.to(self.arrivals.summed_in) if self.partial is None else self.partial.add_(reduced)
            self._partly_reduced |= with_gradient
            return
        with_gradient, self._partly_reduced = with_gradient | self._partly_reduced, frozenset()
        if reduction.to_host:
            self._host_copies.append(_HostCopy(reduction.handoff, reduced, with_gradient))
            return
        del reduction  # and with it borrowed rows, and the sum in another dtype, before more memory is taken
        if scale.after != 1.0 or reduced.dtype != self._grad_dtype:
            reduced = self._as_gradient(reduced, scale)
        hook, stream = policy.all_reduce_hook, policy.all_reduce_hook_stream
        if hook is not None:
            without_flags = reduced[: self._numel]
            if stream is None:
                hook(without_flags)
            else:
                self._streams.run_beside(stream, partial(hook, without_flags))
        if self.group.is_offloaded:
            # Compute has written `reduced` last: the factor, or what the user's hook made of it.
            self._streams.reduce.follow_compute()
            stored, handoff = self._store(lambda: reduced, self._streams.reduce)
            self._host_copies.append(_HostCopy(handoff, stored, with_gradient, reduced))
            return
        if len(with_gradient) < len(self.group.parameters):
            with_gradient = self._anywhere(reduced, with_gradient)
        self._give(reduced, with_gradient)

    def land(self) -> None:
        """Wait for copies to host memory, and add them to the shards' gradients, which optimizers read on the host."""
        host_copies, self._host_copies = self._host_copies, []
        for host_copy in host_copies:
            host_copy.handoff.wait_on_host()
            self._give(host_copy.stored, self._anywhere(host_copy.stored, host_copy.with_gradient))

    def _give(self, reduced: torch.Tensor, with_gradient: frozenset[int]) -> None:
        """Add `reduced`, laid out as `gradient_packing` says, to the `.grad` of the parameters `with_gradient`.

        Each gradient is a view of `reduced`, which lives as long as one of the gradients does.

        Raises:
            GradientError: a `.grad` is no DTensor, or a user's hook on a gradient returned no DTensor.
        """
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        hooked: list[nn.Parameter] = []
        parameters = [each.shard if each.flat is None else each.flat.parameter for each in self._records]
        have_hooks = any(chain.from_iterable(map(hooks_on_gradient, parameters)))
        lacks_some = len(with_gradient) < len(self.group.parameters)
        begin = reduced.storage_offset()
        views = starmap(
            reduced.as_strided, [(*view, at + begin) for *view, at in self._views] if begin else self._views
        )
        each_of = zip(self.group.gradients, parameters, self._forms, views, strict=True)
        for optimizer_param, parameter, (tensor_class, spec), term in each_of:
            if (lacks_some and optimizer_param.members.isdisjoint(with_gradient)) or not parameter.requires_grad:
                continue
            for gap in optimizer_param.gaps:
                # The reduction leaves any values in padding, and a norm would see it.
                reduced[gap.start : gap.stop].zero_()
            # A unit's backward accumulates into unsharded parameters, so torch calls no hook on a shard:
            # test_hooks_on_parameters_see_the_reduced_gradients_and_may_step.
            for hook in gradient_hooks(parameter) if have_hooks else ():
                term = _changed_by_hook(optimizer_param.name, hook, term, spec)
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = new_dtensor(tensor_class, term, spec)
            elif isinstance(gradient, DTensor):
                if gradient._spec is not spec:  # a user's, or of a penalty: `weight.sum()` gives replicated ones
                    gradient = parameter.grad = _laid_out(gradient, spec, term.device)
                sums.append(local_tensor(gradient))
                terms.append(term)
            else:
                raise GradientError(
                    f"{optimizer_param.name}: its .grad is a {type(gradient).__name__}, not a DTensor, so the reduced "
                    "gradient cannot be added to it; set it to None, or to a DTensor placed as the parameter"
                )
            if self._flat is not None and (lacks_some or gradient is not None):
                note_gradients(self._flat, with_gradient, gradient is None)
            if have_hooks:
                hooked.append(parameter)
        if sums:
            torch._foreach_add_(sums, terms)
        # After all sums: such a hook may step an optimizer.
        for parameter in hooked:
            for hook in after_accumulation_hooks(parameter):
                hook(parameter)

    def _as_gradient(self, reduced: torch.Tensor, scale: Scale) -> torch.Tensor:
        dtype = self._grad_dtype
        if scale.after != 1.0:
            reduced = reduced.to(dtype) if dtype.itemsize > reduced.itemsize else reduced
            reduced.mul_(scale.after)
        return reduced if reduced.dtype == dtype else reduced.to(dtype)

    def _anywhere(self, reduced: torch.Tensor, local: frozenset[int]) -> frozenset[int]:
        """Returns the trainable parameters that have a gradient on this rank (`local`) or another one."""
        flags = reduced[self._numel :]
        missing = [i for i, each in enumerate(self.group.parameters) if i not in local and each.requires_grad]
        if not missing or not self.group.num_flags:
            return local
        # On an accelerator the host waits for the flags. So they are read only in steps where something is missing.
        values = flags.tolist()
        return local.union(index for index in missing if values[index] != 0)

    # Giving up

    def drop_unreduced(self) -> None:
        """Drop gradients that no reduction took (`no_sync`), and sums over the shard axis alone."""
        self.arrivals.drop()
        self.partial = None
        self._partly_reduced = frozenset()

    def drop_unreduced_of(self, indices: frozenset[int]) -> None:
        if len(indices) == len(self.group.parameters):
            self.drop_unreduced()
            return
        self.arrivals.drop_of(indices)
        if self.partial is None:
            return
        group, mesh = self.group, self.group.mesh
        pieces = mesh.pieces_of(mesh.shard_rank)
        with torch.no_grad():
            for piece, part in zip(pieces, parts(self.partial, self._plan.reduced_by_piece.of(pieces)), strict=True):
                for index in indices:
                    extent = group.gradient_packing.slots[index].held(piece)
                    part[extent.start : extent.stop].zero_()
                    part[group.gradient_packing.shard_numels[piece] + index] = 0  # the flag
        self._partly_reduced -= indices

    def discard(self) -> None:
        """Drop everything that has not reached the shards."""
        if self._reduction is not None:
            # The rows may still be on their way, and compute's pool must not hand them out before.
            self._reduction.handoff.wait()
            if not self._plan.lane_owns_rows:
                self.arrivals.give_back(self._reduction.rows)
            self._reduction = None
        for host_copy in self._host_copies:
            host_copy.handoff.wait_on_host()
        self._host_copies.clear()
        self.drop_unreduced()
