"""One group's gradients, from autograd to the shards' `.grad`.

    IDLE ──expect──▶ EXPECTING ──reduce──▶ TAKEN ──end_backward──▶ IDLE

    autograd ─▶ noted ─▶ waiting ─▶ rows of a ReduceBuffer ─▶ in flight ─▶ (partial) ─▶ (in host memory) ─▶ .grad

Each gradient is copied once at most: from where autograd left it into the rows that the reduce-scatter sends, in the
reduce dtype, and dropped. With 2 ranks and two tensors (a 2x2, b 2):

    rank 0: a.grad [[1 2] [3 4]]  b.grad [5 6]    rows  | 1 2 | 5 |    its shards get | (1+1)/2 (2+1)/2 | (5+3)/2 |
                                                        | 3 4 | 6 |
    rank 1: a.grad [[1 1] [1 1]]  b.grad [3 3]    rows  | 1 1 | 3 |    its shards get | (3+1)/2 (4+1)/2 | (6+3)/2 |
                                                        | 1 1 | 3 |

The cases, and a test that shows each:

    unused    EXPECTING ─▶ TAKEN with zeros, and flags that say so; others' gradients are given to this rank's shards,
              too: test_parameters_may_be_unused_on_all_or_on_some_ranks
    late      in IDLE a gradient comes that no backward has announced: `begin` announces the backward, which leads to
              EXPECTING: test_a_gradient_that_nobody_expects_is_told_of
    twice     the second gradient of a parameter is added to the first in the rows; after TAKEN it is in rows of its
              own: test_a_graph_that_is_gone_through_twice_and_one_of_gradients_bring_what_they_do_in_plain
    tied      autograd adds up the gradients of all uses, also in other units, before the hook is called:
              test_a_weight_of_several_units_or_calls_is_whole_for_each_whichever_runs_first
    borrowed  a large gradient that is alone in its group is its own rows, uncopied:
              test_a_gradient_that_may_be_borrowed_is_scaled_once_it_was_summed
    kept      EXPECTING ─▶ IDLE without a reduction (`no_sync`): the rows stay, and the next backward adds to them:
              test_gradients_accumulate_with_and_without_reductions
    partial   a reduction over the shard axis alone leaves its sum until replicas are summed, too:
              test_the_all_reduce_between_replicas_may_wait_for_the_last_micro_batch
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from functools import partial, reduce
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import REDUCES_IN_GRAD_DTYPE, dynamo_disabled, exchangeable_hook, local_tensor
from sherd.comm.streams import CommStream, Handoff, Streams, is_capturing
from sherd.comm.transport import Pending, Sizes, Transport, held, parts, then
from sherd.engine.moves.buffer_plan import BufferPlan, Scale
from sherd.engine.moves.buffer_views import ReduceBuffer
from sherd.engine.moves.shard_gradients import ShardGradients
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import num_trainable
from sherd.errors import GradientError, PolicyError
from sherd.policy import UnitPolicy
from sherd.schedule.moments import MemoryKind
from sherd.tensor.spmd_types import unchecked
from sherd.wrap.names import plain_name

if TYPE_CHECKING:
    from sherd.comm.narrowing import Narrowing


class GradientObserver(Protocol):
    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        """Note that `unsharded`, the group's parameter `index`, has a gradient that was not taken yet."""

    def borrowed(self) -> None:
        """Note that the last gradient has become the rows."""

    def copy(self, copy: Callable[[], None]) -> None:
        """Have gradients that waited copied into the rows, by `copy()`."""

    def gives_back(self) -> None:
        """Note that the rows of a reduction are about to be freed."""


def as_dense(gradient: torch.Tensor, group: Group, index: int) -> torch.Tensor:
    """Returns `gradient`, which autograd accumulated for parameter number `index` of `group`, as a plain tensor.

    What is summed over tensor-parallel ranks is summed in the group's reduce dtype, if that is wider, as in torch 2.15.

    Raises:
        GradientError: the gradient is sparse.
    """
    record = group.parameters[index]
    if record.types is not None:
        gradient = record.types.on_mesh(gradient)
    if isinstance(gradient, DTensor):
        spec, dims = record.unsharded_spec, record.mesh.dims
        assert spec is not None, "only a DTensor parameter has a DTensor gradient"
        names = spec.mesh.mesh_dim_names or ()
        data_names = () if dims is None else (*dims.shard_names, *dims.replicate_names)
        data_axes = {names.index(name) for name in data_names if name in names}
        # The tensor-parallel axes as on the parameter. The data-parallel axes stay: the reduction sums over them.
        wanted = [
            have if axis in data_axes else want
            for axis, (have, want) in enumerate(zip(gradient.placements, spec.placements, strict=True))
        ]
        is_narrow = REDUCES_IN_GRAD_DTYPE and gradient.dtype.itemsize < group.reduce_dtype.itemsize
        summed = gradient.redistribute(placements=wanted, forward_dtype=group.reduce_dtype if is_narrow else None)
        gradient = local_tensor(summed)
    if gradient.layout is not torch.strided:
        raise GradientError(
            f"{record.name}: its gradient is {gradient.layout}; only dense gradients are reduced, so build the "
            "embedding with sparse=False"
        )
    if type(gradient) is torch.Tensor:
        return gradient
    # A tensor subclass may have no memory of its own that could be sent, or several.
    with torch.no_grad():
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


OnGradient = Callable[[torch.Tensor], None]


class GradientHooks:
    """The hooks on one group's unsharded parameters.

    Python is called for each gradient until two backwards bring the gradients in the same `order`. From then on it is
    called only for the last gradient of each batch that is copied together: those in `ends`, each with all gradients
    that have come by then. The others are noted in C.
    """

    def __init__(self, plan: BufferPlan, may_note: bool, on_gradient: OnGradient) -> None:
        self.noted: list[torch.Tensor] = []  # parameters whose gradients came, and wait in `.grad`
        self._plan, self._may_note, self._on_gradient = plan, may_note, on_gradient
        self._exchange: dict[int, Callable[[OnGradient], None]] = {}
        self.indices: dict[int, int] = {}  # by the ids of parameters
        self._nbytes: dict[int, int] = {}
        self.order: tuple[int, ...] = ()
        self.ends: dict[int, Set[int]] = {}
        # One hook for all parameters that are not in `ends`, so that one call turns all of them. A `partial` is called
        # in C, and takes another function as it does when it is unpickled.
        self._shared = partial(on_gradient)
        turns = (methodcaller("__setstate__", (to, (), {}, None)) for to in (self.noted.append, on_gradient))
        self._note, self._tell = (partial(turn, self._shared) for turn in turns)

    def watch(self, index: int, parameter: torch.Tensor) -> None:
        """Call `on_gradient(parameter)` whenever `parameter`, the group's parameter `index`, has a gradient."""
        self.forget()
        self._exchange[index] = exchangeable_hook(parameter, self._on_gradient)
        self.indices[id(parameter)], self._nbytes[index] = index, parameter.nbytes

    def expect(self) -> None:
        """Note gradients from now on, if their order is learnt."""
        if self.ends:
            self._note()

    def take(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the `noted` parameters with their indices, in the order of their gradients, and forgets them."""
        # Emptied in place, because the hooks hold the `append` of this very list:
        # test_no_more_gradients_wait_than_are_copied_together.
        noted, self.noted[:] = self.noted[:], ()
        return list(zip(map(self.indices.__getitem__, map(id, noted)), noted, strict=True))

    def rest(self) -> None:
        """Call Python for each gradient from now on. Between backwards one may arrive unexpectedly."""
        if self.ends:
            self._tell()

    def learn(self, order: tuple[int, ...]) -> None:
        """Learn from a backward that brought each gradient once, in this `order`; of any other it is empty."""
        if order != self.order:
            self.forget()
        # In two dtypes there are two forms of each parameter, and the order learnt of one says nothing of the other.
        elif not self.ends and self._may_note and len(self.indices) == len(self._exchange):
            self.ends = self._plan.ends_of(order, self._nbytes)
            for index, exchange in self._exchange.items():
                exchange(self._on_gradient if index in self.ends else self._shared)
        self.order = order

    def forget(self) -> None:
        """Call Python for each gradient, until the order is learnt again."""
        self.rest()
        self.ends, self.order = {}, ()


class GradientStage(IntEnum):
    """A group's gradients in the present backward. An int, because ints hash fast."""

    IDLE = auto()
    """No backward is under way. Gradients may be kept from an earlier one."""
    EXPECTING = auto()
    """A backward brings gradients."""
    TAKEN = auto()
    """A reduction has taken gradients of this backward. More may come."""


MOVES = {
    GradientStage.IDLE: {GradientStage.EXPECTING},
    GradientStage.EXPECTING: {GradientStage.TAKEN, GradientStage.IDLE},
    GradientStage.TAKEN: {GradientStage.IDLE},
}


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one backward.

    Attributes:
        num_expected: the number of the group's trainable parameters.
        borrows: a large gradient may be sent from where autograd left it; nothing writes to it then.
        collects_late: gradients are copied when the reduction starts.
        contributes: gradients count. If False, they are dropped as they come.
        dtype: the dtype of rows that the backward makes.
        scale: turns the sum over all ranks into the mean.
    """

    num_expected: int
    borrows: bool
    collects_late: bool
    contributes: bool
    dtype: torch.dtype
    scale: Scale


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum, and the parameters of which it has gradients of this rank."""

    summed: torch.Tensor
    with_gradient: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction in flight.

    Attributes:
        handoff: tells when it is done.
        rows: what it sends; returned already if a lane owns the rows.
        result: what it fills. Held with its `sources` until compute has waited for the lane.
        scale: the factors of the mean.
        is_partial: over the shard axis only: a later reduction sums over the replicas.
        to_host: the result is a copy in host memory, complete once `handoff` says so.
        sources: what is sent, what is summed over the replicas, and what earlier backwards left. The lane that reads
            them could hand out their memory again if they were dropped before.
    """

    handoff: Handoff
    rows: ReduceBuffer
    result: _Sum
    scale: Scale
    is_partial: bool
    to_host: bool
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A mean on its way to host memory. `source`, if compute owns its memory, is held until the copy is complete."""

    handoff: Handoff
    mean: _Sum
    source: torch.Tensor | None = None

    def wait(self) -> None:
        self.handoff.wait()

    def wait_on_host(self) -> None:
        self.handoff.wait_on_host()


class Rows:
    """The rows of one group. At most one buffer is filled at a time; others are on their way, or wait without memory.

    Attributes:
        present: the buffer that gradients are copied to, or a borrowed gradient; None before the first one.
    """

    def __init__(self, group: Group, plan: BufferPlan, lane: CommStream) -> None:
        self._group, self._plan = group, plan
        self._lane = lane if plan.lane_owns_rows else None
        self._spare = defaultdict[torch.dtype, list[ReduceBuffer]](list)
        self.present: ReduceBuffer | None = None

    def borrow(self, gradient: torch.Tensor) -> bool:
        """Let `gradient`, the group's only one, be the rows. Returns False, and does nothing, if it cannot be."""
        is_fit = self._plan.borrows(gradient.dtype) and gradient.is_contiguous() and not gradient.requires_grad
        if is_fit and self.present is None:
            self.present = ReduceBuffer.borrowed(self._group, gradient)
            return True
        return False

    def make(self, dtype: torch.dtype) -> None:
        """Have empty rows of `dtype`, if there are none."""
        self.present = self.present or self._of(dtype)

    def _of(self, dtype: torch.dtype) -> ReduceBuffer:
        spare = self._spare[dtype]
        return spare.pop() if spare else ReduceBuffer.freed(self._group, self._plan, dtype, self._lane)

    def fill(self, gradients: MutableMapping[int, torch.Tensor], scale: float, dtype: torch.dtype) -> None:
        """Copy in `gradients`, keyed by parameter index, times `scale`. `dtype`: of the rows, if they are made now.

        If the group takes gradients of any dtype, the rows hold them in a dtype that is wide enough for all.
        """
        if self._group.takes_any_gradient:
            dtype = reduce(torch.promote_types, (each.dtype for each in gradients.values()), dtype)
            earlier = self.present
            if earlier is not None and (wide := torch.promote_types(dtype, earlier.dtype)) != earlier.dtype:
                self.present = self._of(wide)
                self.present.copy(earlier)
                self.keep_for_later(earlier)
        if self.present is None:
            self.present = self._of(dtype)
        self.present.fill(gradients, scale)

    def take(self) -> ReduceBuffer:
        """Returns the present rows, which belong to the caller now."""
        rows, self.present = self.present, None
        assert rows is not None, "they were made, or a gradient came"
        return rows

    def keep_for_later(self, rows: ReduceBuffer) -> None:
        """Free the memory of `rows`, and keep their views for the next reduction."""
        if rows is self.present:
            self.present = None
        if rows.buffer.is_ours:
            rows.filled.clear()
            rows.buffer.free()
            self._spare[rows.dtype].append(rows)


class Gradients:
    """One group's gradients, from autograd to the shards' `.grad`.

    `begin()` is called when a gradient comes before a backward was announced, `complete()` when every trainable
    parameter has its gradient.

    Attributes:
        stage: `IDLE`, `EXPECTING` or `TAKEN`.
        terms: of the present backward, or of the last one.
        partial: a sum over the shard axis, which waits for that over the replicas.
        came: the indices of the parameters whose gradients came in this backward, in their order; True for those of
            which autograd made two gradients.
    """

    def __init__(
        self, group: Group, plan: BufferPlan, streams: Streams, begin: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        self.group = group
        self._plan = plan
        self._streams = streams
        self._begin, self._complete = begin, complete
        self._shards = ShardGradients(group)
        self.stage = GradientStage.IDLE
        self.terms = Terms(0, False, plan.collects_late, True, group.reduce_dtype, Scale(1.0, 1.0))
        self._known_terms: dict[tuple[object, ...], Terms] = {}
        self.came: dict[int, bool] = {}
        self._arrived: set[int] = set()  # parameters whose gradients came since all were complete, or were taken
        self._waiting: dict[int, torch.Tensor] = {}
        self._rows = Rows(group, plan, streams.reduce)
        self._reduction: _Reduction | None = None
        self.partial: _Sum | None = None
        self._host_copies: list[_HostCopy] = []
        self._observer: GradientObserver | None = None
        self.narrowing: Narrowing | None = None
        if group.mesh.remembers and group.reduce_dtype.is_floating_point:
            from sherd.comm.narrowing import Narrowing  # of few policies, so loaded late

            self.narrowing = Narrowing()
        # A tensor subclass may need a collective to be made dense, which all ranks must start in the same order.
        self._is_plain = all(each.unsharded_spec is None and each.restored is None for each in group.parameters)
        this = weakref.ref(self)  # parameters hold their hooks, and their group's buffers hold the parameters

        @dynamo_disabled
        def arrived(unsharded: torch.Tensor) -> None:
            gradients = this()
            if gradients is not None:
                gradients._told_of(gradients._hooks.indices[id(unsharded)], unsharded)

        is_typed = any(each.types is not None for each in group.parameters)
        told = unchecked(arrived) if is_typed else arrived
        self._hooks = GradientHooks(plan, self._is_plain and not group.gathers_itself, told)

    def watch(self, index: int, parameter: nn.Parameter) -> None:
        """Take the gradients of `parameter`, an unsharded form of the group's parameter `index`."""
        if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
            return
        # torch registers such a hook only on a tensor that requires a gradient. A frozen parameter gets the hook, too,
        # because it may be trained later.
        self._hooks.watch(index, parameter.requires_grad_(True))
        parameter.requires_grad_(self.group.parameters[index].requires_grad)

    # Questions

    def layout_of(self, names: Sequence[str]) -> str:
        """Returns a digest of which elements of the group's parameters, which have these `names`, are where in rows."""
        mesh, slots = self.group.mesh, self.group.gradient_packing.slots
        over = [reduction is not None and reduction.feedback for reduction in mesh.comm.reductions]
        at = mesh.shard_rank, mesh.replica, mesh.num_replicas, mesh.shards_replicas
        text = repr((names, slots, [each.cut.dim for each in slots], tuple(self._plan.reduced_by_piece), at, over))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def may_lack(self, policy: UnitPolicy) -> bool:
        """Returns whether ranks without gradients take part in a reduction of gradients that others have."""
        return (policy.reduce_unused or self.group.num_flags > 0) and self.terms.num_expected > 0

    @property
    def expects_all(self) -> bool:
        """Whether all parameters of the group are trainable."""
        return self.terms.num_expected == len(self.group.parameters)

    @property
    def has_any(self) -> bool:
        """Whether there are gradients that no reduction took."""
        return bool(
            self._waiting or self._hooks.noted or (self._rows.present is not None and self._rows.present.filled)
        )

    @property
    def has_received(self) -> bool:
        """Whether the present backward has brought a gradient."""
        return bool(self.came or self._hooks.noted)

    @property
    def is_in_flight(self) -> bool:
        return self._reduction is not None

    @property
    def summed_in(self) -> torch.dtype:
        """The dtype in which many micro-batches are added up: the shards', if the reduce dtype is narrower."""
        dtype, reduction = self.group.reduce_dtype, self.group.mesh.comm.reduce
        return torch.promote_types(dtype if reduction is None else reduction.sum_dtype(dtype), self.group.dtype)

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields every buffer and gradient, freed buffers too: what a memory report counts."""
        for gradient in (*(each.grad for each in self._hooks.noted), *self._waiting.values()):
            if gradient is not None:
                yield MemoryKind.ARRIVED, gradient
        if self._rows.present is not None:
            yield MemoryKind.GRADIENT_ROWS, self._rows.present.buffer.tensor
        if self._reduction is not None:
            yield MemoryKind.GRADIENT_ROWS, self._reduction.rows.buffer.tensor
            for summed in (self._reduction.result.summed, *self._reduction.sources):
                yield MemoryKind.REDUCED, summed
        for host_copy in self._host_copies:
            yield MemoryKind.REDUCED, host_copy.mean.summed
        if self.partial is not None:
            yield MemoryKind.REDUCED, self.partial.summed
        for lost in self.narrowing.lost.values() if self.narrowing is not None else ():
            yield MemoryKind.LOST, lost

    @contextmanager
    def observed(self, observer: GradientObserver) -> Iterator[None]:
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    # A backward

    def _move(self, to: GradientStage) -> None:
        assert to in MOVES[self.stage], f"gradients of {self.group.name} cannot go from {self.stage} to {to}"
        self.stage = to

    def expect(self, divide_by: float, may_borrow: bool, reduces: bool, is_one_of_many: bool, contributes: bool) -> int:
        """Prepare for a backward. Returns the number of the group's trainable parameters.

        Args:
            divide_by: the divisor of the summed gradients.
            may_borrow: nothing but the reduction reads the rows.
            reduces: this backward ends with a reduction.
            is_one_of_many: this backward is inside `accumulate`.
            contributes: the gradients count.
        """
        if self.stage is GradientStage.IDLE:
            self._move(GradientStage.EXPECTING)
        if contributes and self._observer is None:
            self._hooks.expect()
        num_expected = num_trainable(self.group.parameters)
        if num_expected != len(self._hooks.order):
            self._hooks.forget()  # others are trained now
        asked = (divide_by, may_borrow, reduces, is_one_of_many, contributes, num_expected)
        if asked not in self._known_terms:
            plan, borrows = self._plan, may_borrow and self._plan.may_borrow
            dtype = self.summed_in if is_one_of_many and not reduces else self.group.reduce_dtype
            scale = plan.scale_for(divide_by, borrows)
            terms = Terms(num_expected, borrows, plan.collects_late and reduces, contributes, dtype, scale)
            self._known_terms[asked] = terms
        self.terms = self._known_terms[asked]
        return num_expected

    def _told_of(self, index: int, unsharded: torch.Tensor) -> None:
        """Take the gradient of `unsharded`, the group's parameter `index`, and all that were noted before."""
        if unsharded.grad is None:
            return  # frozen since its forward: autograd calls the hook and accumulates nothing
        if self.stage is GradientStage.IDLE:
            self._begin()
        self._hooks.noted.append(unsharded)
        self._take_noted()
        if self._hooks.ends and self._hooks.ends.get(index) != self._arrived:
            self._hooks.forget()  # a gradient is missing, or comes in another order
        is_complete = len(self._arrived) >= self.terms.num_expected
        if is_complete:
            self._hooks.rest()
        # What is added to earlier backwards' gradients does not wait for the reduction, even if it collects late.
        waits = self.terms.collects_late and self._rows.present is None
        if not waits and (is_complete or sum(each.nbytes for each in self._waiting.values()) >= self._plan.batch_bytes):
            self._collect()
        if is_complete:
            self._arrived.clear()
            self._complete()

    def _take_noted(self) -> None:
        """Take the gradients of the noted parameters. They wait, or one is borrowed as the rows."""
        gradients: dict[int, torch.Tensor] = {}
        for index, unsharded in self._hooks.take():
            if self._observer is not None:
                self._observer.arrives(index, unsharded)
            # Taken off the parameter, or autograd would add the next gradient in place, to memory that may be on its
            # way as borrowed rows.
            gradient, unsharded.grad = unsharded.grad, None
            if gradient is not None or index in self.came:
                self.came[index] = index in self.came
            if gradient is not None:  # None where autograd added a second gradient to the first, which is taken
                is_dense = self._is_plain and type(gradient) is torch.Tensor and gradient.layout is torch.strided
                gradients[index] = gradient if is_dense else as_dense(gradient, self.group, index)
        if not self._waiting.keys().isdisjoint(gradients):
            # The second gradient of a parameter, from another reentrant checkpoint, is added to the first in the rows.
            self._collect()
        self._arrived.update(gradients)
        terms = self.terms
        if terms.contributes and terms.borrows and self._rows.borrow(*gradients.values()):
            if self._observer is not None:
                self._observer.borrowed()
        elif terms.contributes:
            self._waiting.update(gradients)

    def _collect(self) -> None:
        """Copy all waiting and noted gradients into the rows."""
        if self._hooks.noted:
            self._take_noted()
        if not self._waiting:
            return
        if self._observer is None:
            self._copy()
        else:
            self._observer.copy(self._copy)

    def _copy(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._rows.fill(waiting, self.terms.scale.before, self.terms.dtype)

    def _give_back(self, rows: ReduceBuffer) -> None:
        """Free the memory of `rows`, and keep their views for the next reduction."""
        # Compute is ordered after the reduction, unless the reduce lane owns the rows: it reuses memory in its order.
        if self._observer is not None:
            self._observer.gives_back()
        self._rows.keep_for_later(rows)

    def have_zeros(self) -> None:
        """Have rows for the next reduction. Without gradients they are zero."""
        self._rows.make(self.terms.dtype)

    def end_backward(self) -> bool:
        """Note the end of the backward. Gradients that no reduction took stay in the rows, and the next are added.

        Returns:
            True if one parameter got two gradients in the backward.
        """
        if self._waiting or self._hooks.noted:
            self._collect()
        self._hooks.rest()
        came_twice = True in self.came.values()
        if self.came:
            came_once = not came_twice and len(self.came) == self.terms.num_expected
            self._hooks.learn(tuple(self.came) if came_once else ())
            self.came.clear()
        self.stage = GradientStage.IDLE  # from wherever they are
        self._arrived.clear()
        return came_twice

    # A reduction

    def collect(self) -> None:
        """Copy waiting gradients into the rows, if the reduce lane owns the rows."""
        if self._plan.lane_owns_rows:
            self._collect()

    def reduce(self, policy: UnitPolicy, transport: Transport) -> None:
        """Start the reduction: over the shard axis, and over the replicas if `policy` says so."""
        awaits_replicas = self.partial is not None and policy.all_reduce_gradients  # of earlier backwards
        if self._waiting or self._hooks.noted:
            self._collect()
        self._arrived.clear()
        if self.stage is GradientStage.EXPECTING:
            self._move(GradientStage.TAKEN)
        elif self._plan.owned is not None:
            self._require_first_sum()
        if self._rows.present is None:
            if not (awaits_replicas or self.may_lack(policy)):
                return
            self._rows.make(self.terms.dtype)
        rows = self._rows.take()
        group, mesh, plan = self.group, self.group.mesh, self._plan
        if group.takes_any_gradient:
            self._shards.take_dtype(rows.dtype, policy, is_added=self.partial is not None)
        rows.complete(plan.padding)
        sizes, reduce_dtype = plan.reduced_by_rank, self._shards.form.reduce_dtype
        result: list[torch.Tensor] = []
        # The rows of one rank are the sum, which goes to host memory on the lane that owns them.
        is_of_one = group.is_one_piece and mesh.num_replicas == 1 and plan.owned is None
        is_sum = is_of_one and group.is_offloaded and policy.all_reduce_hook is None
        sent, earlier = rows.buffer.tensor, self.partial
        sent = sent if sent.dtype == reduce_dtype else sent.to(reduce_dtype)  # else added wider
        self.partial = earlier if plan.owned is None and not policy.all_reduce_gradients else None

        def scatter(async_op: bool) -> Pending | None:
            if is_sum and plan.lane_owns_rows:
                result.append(sent)
                return None
            if plan.owned is not None:
                return self._add_in_order(result, rows, sent, earlier, async_op)
            # Inside `scatter`, which runs on the lane: the stream that writes the sum first owns its memory.
            reduced = transport.empty(sizes[mesh.shard_rank], transport.sum_dtype(reduce_dtype), group.device)
            result.append(reduced)
            return transport.reduce_scatter(reduced, sent, sizes, async_op)

        # Whoever owns the rows, compute has just written them. For `reduced` the lane's pool may hand out the memory of
        # an earlier sum, which compute read last, as a `.grad` that was dropped since.
        self._streams.reduce.follow_compute()
        handoff = self._streams.reduce.run(scatter)
        (reduced,) = result
        sources = [] if plan.lane_owns_rows and sent is rows.buffer.tensor else [sent]
        with_gradient = frozenset(range(len(group.parameters))) if policy.reduce_unused else frozenset(rows.filled)
        is_partial = not policy.all_reduce_gradients and (mesh.num_replicas > 1 or plan.owned is not None)
        if earlier is not None and self.partial is None:
            with_gradient |= earlier.with_gradient
        if plan.owned is not None:
            if mesh.holds_copies and not is_partial:
                sources.append(reduced)
                reduced, handoff = self._join_replicas(reduced, plan.owned, handoff)
        elif mesh.num_replicas > 1 and not is_partial:
            sources += [reduced] if earlier is None else [reduced, earlier.summed]
            reduced, handoff = self._sum_over_replicas(reduced, earlier, handoff, policy.all_reduce)
        scale, to_host = self.terms.scale, group.is_offloaded and not is_partial and policy.all_reduce_hook is None
        self._reduction = _Reduction(handoff, rows, _Sum(reduced, with_gradient), scale, is_partial, to_host, sources)
        if plan.lane_owns_rows and not is_sum:
            # Freed while the reduce-scatter is only queued: the lane's pool gives the memory to later work of the lane.
            self._give_back(rows)
        if to_host:
            # On the lane that made the sum: the memory of the sum goes back to it.
            is_of_shards = mesh.num_replicas == 1 or (plan.owned is not None and mesh.shards_replicas)
            lane = self._streams.reduce if is_of_shards else self._streams.all_reduce
            stored, handoff = self._store(partial(self._shards.mean, reduced, scale), lane, handoff)
            self._reduction = replace(self._reduction, handoff=handoff, result=_Sum(stored, with_gradient))
        if plan.lane_owns_rows and is_sum:
            self._give_back(rows)

    def _require_first_sum(self) -> None:
        """Raise PolicyError if the backward has had a sum, where sums are in the order of ranks."""
        if self.stage is GradientStage.TAKEN:
            raise PolicyError(
                f"{self.group.name}: a second reduction in one backward, and Reduction(order='ranks') has one for each "
                "batch; call the unit once in a forward: shard the module that calls it twice instead"
            )

    def narrowed(self, transport: Transport, number: int) -> Transport:
        """Returns `transport` for a reduction after `number` backwards, of which is kept what it loses.

        Raises:
            PolicyError: it would round at random in a graph, whose replays draw the same numbers.
        """
        assert self.narrowing is not None, "the policy asks for it"
        reductions = self.group.mesh.comm.reductions
        if any(each is not None and each.is_stochastic for each in reductions) and is_capturing(self.group.device):
            raise PolicyError(
                f"{self.group.name}: Reduction(rounding='stochastic') in a step that is captured as a graph: replays "
                "would draw the same random numbers; take feedback=True in its place"
            )
        self.narrowing.begin(number, plain_name(self.group.parameters[0].name))
        return transport.narrowed_by(self.narrowing, "shards")

    def _add_in_order(
        self, result: list[torch.Tensor], rows: ReduceBuffer, sent: torch.Tensor, earlier: _Sum | None, async_op: bool
    ) -> Pending | None:
        """Sum over all ranks in their order, on the lane, onto what `earlier` backwards left. `result` gets the sum."""
        in_order, owned = self.group.mesh.in_order, self._plan.owned
        assert in_order is not None and owned is not None, "the policy asks for these sums"
        dtype = in_order.reduction.sum_dtype(sent.dtype)
        if earlier is None:
            result.append(torch.zeros(owned[in_order.part], dtype=dtype, device=self.group.device))
        else:
            result.append(earlier.summed.to(dtype))
        if self.narrowing is None:
            return in_order.add(result[0], sent, owned, async_op)
        # By parameter and batch, as on any number of ranks.
        names = [plain_name(each.name) for each in self.group.parameters]
        rounded = rows.rounded([self.narrowing.key(in_order.reduction, name, *in_order.at) for name in names])
        return then(in_order.add(result[0], rounded, owned, async_op), partial(held, rounded))

    def _owned_of_shard(self, owned: Sizes) -> Sizes:
        """Returns the lengths of the parts of this rank's shard that its replicas own."""
        first, num = self.group.mesh.shard_rank * self.group.mesh.num_replicas, self.group.mesh.num_replicas
        return owned.of(range(first, first + num))

    def _join_replicas(self, own: torch.Tensor, owned: Sizes, summed: Handoff) -> tuple[torch.Tensor, Handoff]:
        """Gather the shard of which each replica has summed up a part. Returns it, and its handoff."""
        mesh, result, sizes = self.group.mesh, list[torch.Tensor](), self._owned_of_shard(owned)

        def run(async_op: bool) -> Pending | None:
            result.append(mesh.replicate_transport.empty(sum(sizes), own.dtype, own.device))
            return mesh.replicate_transport.all_gather(result[0], own, sizes, async_op)

        handoff = self._streams.all_reduce.run(run, after=summed)
        return result[0], handoff

    def _sum_over_replicas(
        self,
        reduced: torch.Tensor,
        earlier: _Sum | None,
        scattered: Handoff,
        user: Callable[[torch.Tensor], None] | None,
    ) -> tuple[torch.Tensor, Handoff]:
        """Sum over the replicas, with the sum that earlier backwards left, once `scattered` is done.

        Returns the sum, and its handoff: of this replica's part only, where the shard is divided over replicas.
        """
        mesh, result, between = self.group.mesh, [reduced], self.group.mesh.replicate_transport
        if self.narrowing is not None:
            between = between.narrowed_by(self.narrowing, "replicas")
        # A transport may have summed in a wider dtype than is to travel. A policy says itself what travels.
        is_ours = mesh.comm.reduce is None and mesh.comm.reduce_replicas is None and user is None
        wire = self._shards.form.reduce_dtype if is_ours else reduced.dtype

        def run(async_op: bool) -> Pending | None:
            if earlier is not None:
                # `earlier` is as wide as the shards. It is added in that width, and sent in the reduce dtype.
                reduced.copy_(earlier.summed.add_(reduced))
            sent = result[0] = reduced.to(wire)
            if mesh.shards_replicas:
                own = self._plan.reduced_by_piece.of(mesh.pieces_of(mesh.shard_rank))
                result[0] = between.empty(own[mesh.replica], between.sum_dtype(wire), reduced.device)
                pending = between.reduce_scatter(result[0], sent, own, async_op)
                return pending if sent is reduced else then(pending, partial(held, sent))
            if user is not None:
                user(reduced)
                return None
            return between.all_reduce(sent, async_op)

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
            self._give_back(reduction.rows)
        reduced, with_gradient, scale = reduction.result.summed, reduction.result.with_gradient, reduction.scale
        if reduction.is_partial and self._plan.owned is not None:
            self.partial = reduction.result
            return
        if reduction.is_partial:
            earlier = self.partial
            self.partial = (
                _Sum(reduced.to(self.summed_in), with_gradient)
                if earlier is None
                else _Sum(earlier.summed.add_(reduced), earlier.with_gradient | with_gradient)
            )
            return
        if reduction.to_host:
            self._host_copies.append(_HostCopy(reduction.handoff, reduction.result))
            return
        del reduction  # and with it borrowed rows, and the sum in another dtype, before more memory is taken
        if scale.after != 1.0 or reduced.dtype != self._shards.form.dtype:
            reduced = self._shards.mean(reduced, scale)
        hook, stream = policy.all_reduce_hook, policy.all_reduce_hook_stream
        if hook is not None:
            without_flags = reduced[: self._shards.numel]
            if stream is None:
                hook(without_flags)
            else:
                self._streams.run_beside(stream, partial(hook, without_flags))
        if self.group.is_offloaded:
            # Compute has written `reduced` last: the factor, or what the user's hook made of it.
            self._streams.reduce.follow_compute()
            stored, handoff = self._store(lambda: reduced, self._streams.reduce)
            self._host_copies.append(_HostCopy(handoff, _Sum(stored, with_gradient), reduced))
            return
        if len(with_gradient) < len(self.group.parameters):
            with_gradient = self._shards.anywhere(reduced, with_gradient)
        self._shards.give(reduced, with_gradient)

    def land(self, ahead: bool = False) -> list[Handoff]:
        """Wait for copies to host memory, and add them to the shards' gradients, which optimizers read on the host.

        Returns the copies that were not waited for: with `ahead` those that nothing reads here.
        """
        arriving: list[Handoff] = []
        while self._host_copies:
            host_copy = self._host_copies.pop(0)
            stored, with_gradient = host_copy.mean.summed, host_copy.mean.with_gradient
            if ahead and self._shards.take_unread(with_gradient):
                arriving.append(host_copy)
            else:
                host_copy.wait_on_host()
            self._shards.give(stored, self._shards.anywhere(stored, with_gradient))
        return arriving

    # Giving up

    def drop_unreduced(self) -> None:
        """Drop gradients that no reduction took (`no_sync`), and sums over the shard axis alone."""
        if self._hooks.noted:
            self._take_noted()
        self._waiting.clear()
        if self._rows.present is not None:
            self._give_back(self._rows.present)
        self.partial = None

    def drop_unreduced_of(self, indices: frozenset[int]) -> None:
        """Drop those of the parameters `indices`."""
        if len(indices) == len(self.group.parameters):
            self.drop_unreduced()
            return
        self._collect()
        if self._rows.present is not None:
            self._rows.present.filled -= indices
            if not self._rows.present.filled:
                self._give_back(self._rows.present)
        if self.partial is None:
            return
        group, mesh = self.group, self.group.mesh
        pieces = mesh.pieces_of(mesh.shard_rank)
        sizes = self._plan.reduced_by_piece.of(pieces)
        is_dropped = torch.zeros(sum(sizes), dtype=torch.bool)
        for piece, part in zip(pieces, parts(is_dropped, sizes), strict=True):
            for index in indices:
                extent = group.gradient_packing.slots[index].held(piece)
                part[extent.start : extent.stop] = True
                part[group.gradient_packing.shard_numels[piece] + index] = True  # the flag
        if self._plan.owned is not None:
            is_dropped = parts(is_dropped, self._owned_of_shard(self._plan.owned))[mesh.replica]
        with torch.no_grad():
            self.partial.summed.masked_fill_(is_dropped.to(group.device), 0)
        self.partial = replace(self.partial, with_gradient=self.partial.with_gradient - indices)

    def discard(self) -> None:
        """Drop everything that has not reached the shards."""
        if self._reduction is not None:
            # The rows may still be on their way, and compute's pool must not hand them out before.
            self._reduction.handoff.wait()
            if not self._plan.lane_owns_rows:
                self._give_back(self._reduction.rows)
            self._reduction = None
        for host_copy in self._host_copies:
            host_copy.handoff.wait_on_host()
        self._host_copies.clear()
        self.drop_unreduced()
