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

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from sherd._torch import (
    dynamo_disabled,
)
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import Pending, Sizes, Transport, parts
from sherd.engine.moves.arriving import GradientObserver, as_dense
from sherd.engine.moves.reduce_buffer import PendingGradients, ReduceBuffer
from sherd.engine.moves.scale import MANY_RANKS, Scale, add_earlier
from sherd.engine.moves.shard_gradients import ShardGradients
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import num_trainable
from sherd.policy import UnitPolicy
from sherd.schedule.moments import MemoryKind


@dataclass(eq=False, slots=True)
class _Reduction:
    """A reduction under way. `partial`: over the shard axis only; the replicas will be summed another time.

    `sources` are what is sent, what is summed over the replicas, and what earlier backwards left to it; held until
    compute has waited for the lane that reads them, or the reduce lane could hand their memory out again.
    """

    handoff: Handoff
    rows: ReduceBuffer
    reduced: torch.Tensor
    with_gradient: frozenset[int]
    scale: Scale
    partial: bool
    sources: list[torch.Tensor]


class Gradients:
    """One group's gradients. `begin()` is called when one comes though nobody has said `expect`, `complete()` when
    every trainable parameter has had its gradient. `is_expecting`: it was said, and the backward is not over;
    `came_twice`: two of one parameter have come since.

    It `may_borrow` if a gradient in the reduce dtype, the group's only one, is sent from where autograd has left it. It
    `collects_late` if gradients that will be reduced wait as they are, and rows are allocated for the reduction only:
    after the unsharded parameters were freed, and the rows of the unit before."""

    def __init__(self, group: Group, streams: Streams, begin: Callable[[], None], complete: Callable[[], None]) -> None:
        self.group = group
        self._streams = streams
        self._begin = begin
        self._complete = complete
        self.is_expecting = False
        self._shards = ShardGradients(group)
        self._observer: GradientObserver | None = None
        self._arrived: set[int] = set()
        self._came: set[int] = set()
        self.came_twice = False
        self._pending = PendingGradients(group)
        self._reduction: _Reduction | None = None
        self._partial: torch.Tensor | None = None
        self._partly_reduced: frozenset[int] = frozenset()
        self._scale = Scale(1.0, 1.0)
        self._expected = 0
        is_alone = len(group.parameters) == 1 and group.packing.direct and group.num_flags == 0
        self.may_borrow = is_alone and streams.in_host_order and group.reduce_dtype != torch.float16
        # Without streams small gradients are copied as they come, while they are in the cache. Large rows would stand
        # beside all activations of the unit: test_large_rows_are_allocated_once_a_units_parameters_are_free.
        self.collects_late = group.has_large_rows or not streams.in_host_order
        self._sums_many = False
        self._borrows = False
        self._reduces = True

    def watch(self, index: int, parameter: nn.Parameter) -> None:
        """Take each gradient of `parameter`, the unsharded form of the group's parameter `index`."""
        if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
            return
        this = weakref.ref(self)  # the parameter holds its hook, and we hold the parameter

        @dynamo_disabled
        def arrived(unsharded: torch.Tensor) -> None:
            gradients = this()
            if gradients is not None:
                gradients._take(index, unsharded)

        parameter.requires_grad_(True).register_post_accumulate_grad_hook(arrived)
        parameter.requires_grad_(self.group.parameters[index].requires_grad)

    # Collecting

    def expect(self, divide_by: float, may_borrow: bool, reduces: bool, is_one_of_many: bool) -> None:
        """Prepare for a backward.

        Args:
            divide_by: the divisor of the summed gradients.
            may_borrow: a large gradient may be sent from where autograd left it; nobody writes to it then.
            reduces: this backward ends with a reduction.
            is_one_of_many: it is inside `accumulate`.
        """
        self.is_expecting = True
        self._reduces = reduces
        self._sums_many = is_one_of_many and not reduces
        self._expected = num_trainable(self.group.parameters)
        dtype = self.group.reduce_dtype
        self._borrows = may_borrow and self.may_borrow
        # A borrowed gradient is autograd's, and not written to: it is scaled once it was summed. So are those of many
        # ranks: their rows are many short strips, which a plain copy fills faster, and a shard is soon scaled.
        many = self.group.packing.num_ranks >= MANY_RANKS and dtype.itemsize >= 4
        self._scale = Scale(1.0, 1 / divide_by) if self._borrows or many else Scale.for_(dtype, divide_by)

    @property
    def expects_any(self) -> bool:
        """Whether the group has a trainable parameter."""
        return self._expected > 0

    @property
    def has_received(self) -> bool:
        """Whether one has come in the present backward."""
        return bool(self._came)

    @property
    def expects_all(self) -> bool:
        """Whether all of the group's parameters are trainable."""
        return self._expected == len(self.group.parameters)

    @property
    def unreduced(self) -> bool:
        """Whether there are gradients that no reduction has taken, or that one has taken half of the way."""
        return self._partial is not None or self._pending.has_any

    def awaits_reduction(self, policy: UnitPolicy) -> bool:
        """Whether one that does what `policy` says has something to do."""
        return self._pending.has_any or (self._partial is not None and policy.all_reduce_gradients)

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Everything whose memory is in its hands now, freed buffers too: what a memory report counts."""
        yield from self._pending.held()
        if self._reduction is not None:
            yield MemoryKind.GRADIENT_ROWS, self._reduction.rows.buffer.tensor
            yield MemoryKind.REDUCED, self._reduction.reduced
            for source in self._reduction.sources:
                yield MemoryKind.REDUCED, source
        if self._partial is not None:
            yield MemoryKind.REDUCED, self._partial

    @property
    def _waits(self) -> bool:
        """Whether what has come is not copied yet; what is added to earlier backwards' gradients is, at once."""
        return self.collects_late and self._reduces and self._pending.rows is None

    @contextmanager
    def observed(self, observer: GradientObserver) -> Iterator[None]:
        """Have `observer` see each gradient that comes inside the context."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _take(self, index: int, unsharded: torch.Tensor) -> None:
        gradient = unsharded.grad
        if gradient is None:
            return  # frozen since its forward: autograd has come here and accumulated nothing
        if self._observer is not None:
            self._observer.arrives(index, unsharded)
        unsharded.grad = None
        if not self.is_expecting:
            self._begin()
        if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            gradient = as_dense(gradient, self.group.parameters[index])
        if self._pending.has_waiting(index):
            # A second one in the same backward, from another reentrant checkpoint: it is added to the first, which must
            # be in the rows for that.
            self._copy_batch()
        self.came_twice |= index in self._came
        self._came.add(index)
        self._arrived.add(index)
        if self._can_borrow(gradient):
            self._pending.borrow(gradient)
        else:
            self._pending.add(index, gradient)
        is_complete = len(self._arrived) >= self._expected
        if not self._waits and (is_complete or self._pending.is_due):
            self._copy_batch()
        if is_complete:
            self._arrived.clear()
            self._complete()

    def _can_borrow(self, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is the rows already: the group's only tensor, laid out and typed as it will be sent."""
        fits = gradient.numel() == self.group.packing.gathered_numel
        same = fits and gradient.dtype == self.group.reduce_dtype and gradient.is_contiguous()
        return same and self._borrows and self._pending.rows is None and not gradient.requires_grad

    def _copy_batch(self) -> None:
        if self._pending.waits:
            with torch.no_grad():
                if self._observer is None:
                    self._pending.copy_in(self._scale.before, self._rows_dtype)
                else:
                    self._observer.copy(lambda: self._pending.copy_in(self._scale.before, self._rows_dtype))

    @property
    def _rows_dtype(self) -> torch.dtype:
        return self._summed_in if self._sums_many else self.group.reduce_dtype

    # Reducing

    def reduce(self, policy: UnitPolicy, transport: Transport) -> None:
        """Start the reduction of what was collected: over the shard axis, and over the replicas if `policy` says so."""
        self._copy_batch()
        self._arrived.clear()
        awaits_replicas = self._partial is not None and policy.all_reduce_gradients  # of earlier backwards
        if self._pending.rows is None and not awaits_replicas and not self.may_lack(policy):
            return
        group, mesh = self.group, self.group.mesh
        rows = self._pending.take(self._rows_dtype)
        rows.complete()
        sizes = rows.shard_sizes
        result: list[torch.Tensor] = []
        sent = rows.buffer.tensor.to(group.reduce_dtype)  # itself, unless many were added up in it

        def scatter(async_op: bool) -> Pending | None:
            dtype = transport.sum_dtype(group.reduce_dtype)
            reduced = transport.empty(sizes[mesh.shard_rank], dtype, group.device)
            result.append(reduced)
            return transport.reduce_scatter(reduced, sent, sizes, async_op)

        # The rows are compute's memory and compute has just written them.
        self._streams.reduce.follow_compute()
        handoff = self._streams.reduce.run(scatter)
        (reduced,) = result
        replicated = mesh.num_replicas > 1
        sources = [sent]
        if replicated and policy.all_reduce_gradients:
            earlier, self._partial = self._partial, None
            sources += [reduced] if earlier is None else [reduced, earlier]
            if mesh.shards_replicas:
                reduced, handoff = self._reduce_pieces(reduced, earlier, handoff, rows.sizes)
            else:
                handoff = self._all_reduce(reduced, earlier, handoff, policy.all_reduce)
        used = frozenset(range(len(group.parameters))) if policy.reduce_unused else frozenset(rows.filled)
        partial = replicated and not policy.all_reduce_gradients
        self._reduction = _Reduction(handoff, rows, reduced, used, self._scale, partial, sources)

    def may_lack(self, policy: UnitPolicy) -> bool:
        """Whether ranks that have no gradients take part in the reduction of those that others have."""
        return self.expects_any and (policy.reduce_unused or self.group.num_flags > 0)

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
        self, reduced: torch.Tensor, earlier: torch.Tensor | None, scattered: Handoff, sizes: Sizes
    ) -> tuple[torch.Tensor, Handoff]:
        """The same where each replica owns a piece of the shard, and gets the sum of that only. `sizes` are all
        pieces'."""
        mesh = self.group.mesh
        transport = mesh.replicate_transport
        result: list[torch.Tensor] = []

        def run(async_op: bool) -> Pending | None:
            add_earlier(reduced, earlier)
            own = sizes.of(mesh.pieces_of(mesh.shard_rank))
            result.append(transport.empty(own[mesh.replica], transport.sum_dtype(reduced.dtype), reduced.device))
            return transport.reduce_scatter(result[0], reduced, own, async_op)

        handoff = self._streams.all_reduce.run(run, after=scattered)
        return result[0], handoff

    def finish_reduce(self, policy: UnitPolicy) -> None:
        """Order compute after the reduction, add its result to the shards' gradients, free the rows."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        reduction.handoff.wait()
        self._pending.give_back(reduction.rows)
        reduced, with_gradient, scale = reduction.reduced, reduction.with_gradient, reduction.scale
        if reduction.partial:
            self._partial = reduced.to(self._summed_in) if self._partial is None else self._partial.add_(reduced)
            self._partly_reduced |= with_gradient
            return
        del reduction  # and with it borrowed rows, and the sum in another dtype, before more memory is taken
        dtype = self.group.grad_dtype
        if scale.after != 1.0:
            reduced = reduced.to(dtype) if dtype.itemsize > reduced.itemsize else reduced
            reduced.mul_(scale.after)
        if reduced.dtype != dtype:
            reduced = reduced.to(dtype)
        if policy.all_reduce_hook is not None:
            self._run_hook(policy, reduced)
        with_gradient, self._partly_reduced = with_gradient | self._partly_reduced, frozenset()
        with_gradient |= self._elsewhere(reduced, with_gradient)
        self._shards.give(self.group.place.store(reduced), with_gradient)

    @property
    def _summed_in(self) -> torch.dtype:
        """What many micro-batches are added up in: the shards' dtype, if the reduce dtype is narrower."""
        return torch.promote_types(self.group.reduce_dtype, self.group.dtype)

    def _elsewhere(self, reduced: torch.Tensor, here: frozenset[int]) -> frozenset[int]:
        """The trainable parameters without a gradient here that have one on another rank."""
        flags = reduced[self.group.shard_numel :]
        parameters = self.group.parameters
        missing = [i for i, each in enumerate(parameters) if i not in here and each.requires_grad]
        if not missing or not flags.numel():
            return frozenset()
        # Read by the host, which waits for it on an accelerator: only in steps where something is missing.
        values = flags.tolist()
        return frozenset(index for index in missing if values[index] != 0)

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
        self._pending.drop()
        self._partial = None
        self._partly_reduced = frozenset()

    def drop_unreduced_of(self, indices: frozenset[int]) -> None:
        """The same of these parameters of the group only."""
        if len(indices) == len(self.group.parameters):
            self.drop_unreduced()
            return
        self._copy_batch()
        self._pending.drop_of(indices)
        if self._partial is not None:
            self._zero(self._partial, indices)
            self._partly_reduced -= indices

    @torch.no_grad()
    def _zero(self, partial: torch.Tensor, indices: frozenset[int]) -> None:
        """Zero what a sum over the shard axis has of these parameters, and their flags."""
        group, mesh = self.group, self.group.mesh
        pieces = mesh.pieces_of(mesh.shard_rank)
        sizes = Sizes(numel + group.num_flags for numel in group.sizes).of(pieces)
        for piece, part in zip(pieces, parts(partial, sizes), strict=True):
            for index in indices:
                held = group.packing.slots[index].held(piece)
                part[held.start : held.stop].zero_()
                part[group.packing.shard_numels[piece] + index] = 0

    def discard(self) -> None:
        """Drop everything that has not reached the shards."""
        if self._reduction is not None:
            self._reduction.handoff.wait()
            self._pending.give_back(self._reduction.rows)
            self._reduction = None
        self.drop_unreduced()
        self._arrived.clear()

    def end_backward(self) -> None:
        """The pass is over: gradients that did not come will not come. Those that no reduction has taken wait in the
        rows, where the next backward's are added to them."""
        self.is_expecting = self.came_twice = False
        self._copy_batch()
        self._arrived.clear()
        self._came.clear()
