"""The gradients of one group as autograd brings them, until a reduction takes them.

autograd ──noted──▶ waiting, as they came ──1 MiB, or all──▶ rows of a reduce buffer ──take──▶ reduction
                                                             ▲
                    a large one, alone in its group ──────────┘ borrowed: it is its own rows
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from operator import methodcaller
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import REDUCES_IN_GRAD_DTYPE, dynamo_disabled, exchangeable_hook, local_tensor
from sherd.comm.buffers import Buffer
from sherd.comm.streams import CommStream
from sherd.engine.moves.buffer_plan import BATCH_BYTES, BufferPlan, Scale
from sherd.engine.moves.buffer_views import JoinedTensors, RowViews
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, num_trainable
from sherd.errors import GradientError
from sherd.schedule.moments import MemoryKind
from sherd.tensor.spmd_types import unchecked


class GradientObserver(Protocol):
    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        """Note that `unsharded`, the group's parameter `index`, has a gradient that was not taken yet."""

    def borrowed(self) -> None:
        """Note that the last gradient has become the rows."""

    def copy(self, copy: Callable[[], None]) -> None:
        """Have gradients that waited copied into the rows, by `copy()`."""

    def gives_back(self) -> None:
        """Note that the rows of a reduction are about to be freed."""


# What a gradient is copied to


class ReduceBuffer:
    """The buffer that one reduce-scatter sends: a group's gradients, rank by rank, and a flag for each of them.

    Each rank's part ends with a flag for every tensor of the group, 1 where this rank has a gradient of the tensor.
    After the sum the flags tell a rank without a gradient that others have one. That rank takes its part of the sum,
    too, or the shards would drift apart. A large tensor with a group to itself has no flag: the group is not reduced
    without its gradient.
    """

    def __init__(self, group: Group, buffer: Buffer, lane: CommStream | None = None) -> None:
        self.buffer = buffer
        self._lane = lane
        self._packing = group.gradient_packing
        self._num_flags = group.num_flags
        self.filled: set[int] = set()  # the indices of the tensors whose gradients are in the buffer

    @cached_property
    def _places(self) -> RowViews:
        """The places of gradients and flags. Made on first use: a borrowed gradient needs none."""
        return RowViews(self._packing, self.buffer.tensor, self._num_flags)

    @cached_property
    def _joined(self) -> JoinedTensors:
        return JoinedTensors(self._packing, self.buffer.tensor, BATCH_BYTES)

    @classmethod
    def freed(cls, group: Group, plan: BufferPlan, dtype: torch.dtype, lane: CommStream | None) -> ReduceBuffer:
        """Returns rows without memory. The first fill allocates it, from compute's pool, or from that of `lane`."""
        buffer = Buffer(sum(plan.reduced_by_piece), dtype, group.device)
        buffer.free()
        return cls(group, buffer, lane)

    @classmethod
    def borrowed(cls, group: Group, gradient: torch.Tensor) -> ReduceBuffer:
        """Returns rows that are the gradient of the group's only tensor, uncopied. Such a group has no flags."""
        rows = cls(group, Buffer.around(gradient.detach().view(-1)))
        rows.filled.add(0)
        return rows

    def _allocate(self) -> None:
        if self._lane is None:
            self.buffer.allocate()
        else:
            self._lane.lend(self.buffer.allocate)

    def fill(self, gradients: MutableMapping[int, torch.Tensor], scale: float) -> None:
        """Copy in `gradients`, keyed by parameter index, times `scale`. Add and drop those of `filled` parameters."""
        if torch.is_grad_enabled():  # in a backward that is differentiated, or after one
            with torch.no_grad():
                self.fill(gradients, scale)
            return
        if not self.filled:
            self._allocate()
            if self._joined.take(gradients):
                self.filled.update(gradients)
                if scale != 1.0:
                    self.buffer.tensor.mul_(scale)
                return
        again = {at: gradients.pop(at) for at in self.filled.intersection(gradients)} if self.filled else {}
        targets, sources = self._places.pairs(again) if again else ([], [])
        if targets:  # tensors may have no elements
            torch._foreach_add_(targets, sources, alpha=scale)
        targets, sources = self._places.pairs(gradients)
        if scale == 1.0 and targets:
            torch._foreach_copy_(targets, sources)
        for target, source in zip(targets, sources, strict=True) if scale != 1.0 else ():
            # Scaled while it is copied. A narrow gradient is widened first, or it would be rounded twice.
            if source.dtype == target.dtype:
                torch.mul(source, scale, out=target)
            else:
                target.copy_(source).mul_(scale)
        self.filled.update(gradients)

    def copy(self, rows: ReduceBuffer) -> None:
        """Take over what is in `rows`, of another dtype."""
        self._allocate()
        self.buffer.tensor.copy_(rows.buffer.tensor)
        self.filled = set(rows.filled)

    def complete(self) -> None:
        """Write the flags, and zeros in the place of each gradient that is missing."""
        if not self.filled:
            self._allocate()
        missing = [index for index in range(len(self._packing.slots)) if index not in self.filled]
        for view in (view for index in missing for view in self._places.tensors[index]):
            view.zero_()
        for flags in self._places.flags if self._num_flags else ():
            flags.fill_(1)
            for index in missing:
                flags[:, index : index + 1] = 0


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


# What autograd tells


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
        # In two dtypes there are two forms of each parameter, and the order learnt of one says nothing of the other.
        self._may_note &= index not in self._exchange
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
        elif not self.ends and self._may_note:
            self.ends = self._plan.ends_of(order, self._nbytes)
            for index, exchange in self._exchange.items():
                exchange(self._on_gradient if index in self.ends else self._shared)
        self.order = order

    def forget(self) -> None:
        """Call Python for each gradient, until the order is learnt again."""
        self.rest()
        self.ends, self.order = {}, ()


class Arrivals:
    """One group's gradients that no reduction has taken yet.

    `lane` is the lane of the reductions. `begin()` is called when a gradient comes without an `expect` before it,
    `complete()` when every trainable parameter has its gradient. `scale` turns the sum over all ranks into the mean.
    """

    def __init__(
        self, group: Group, plan: BufferPlan, lane: CommStream, begin: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        self._group = group
        self._plan = plan
        self._lane = lane if plan.lane_owns_rows else None
        self._begin = begin
        self._complete = complete
        self._observer: GradientObserver | None = None
        self._waiting: dict[int, torch.Tensor] = {}
        self._rows: ReduceBuffer | None = None
        self._spare: dict[torch.dtype, list[ReduceBuffer]] = {}
        self._arrived: set[int] = set()
        self._came: dict[int, None] = {}  # in the order in which they came
        self.came_twice = False  # one parameter got two gradients in the present backward
        self.was_taken = False  # a reduction was started in the present backward
        self.num_expected, self.expects_all = 0, False  # trainable parameters, and whether all are
        self.is_expecting, self._contributes = False, True
        self._borrows = False
        self._waits_for_reduction = plan.collects_late
        self._dtype = group.reduce_dtype
        self.scale = Scale(1.0, 1.0)
        self._scales: dict[tuple[bool, float], Scale] = {}
        # A tensor subclass may need a collective to be made dense, which all ranks must start in the same order.
        self._is_plain = all(each.unsharded_spec is None and each.restored is None for each in group.parameters)
        is_typed = any(each.types is not None for each in group.parameters)
        this = weakref.ref(self)  # parameters hold their hooks, and their group's buffers hold the parameters

        @dynamo_disabled
        def arrived(unsharded: torch.Tensor) -> None:
            arrivals = this()
            if arrivals is not None:
                arrivals._told_of(arrivals._hooks.indices[id(unsharded)], unsharded)

        told = unchecked(arrived) if is_typed else arrived
        self._hooks = GradientHooks(plan, self._is_plain and not group.gathers_itself, told)

    def watch(self, index: int, parameter: nn.Parameter) -> None:
        if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
            return
        # torch registers such a hook only on a tensor that requires a gradient. A frozen parameter gets the hook, too,
        # because it may be trained later.
        self._hooks.watch(index, parameter.requires_grad_(True))
        parameter.requires_grad_(self._group.parameters[index].requires_grad)

    # A backward

    def expect(
        self, divide_by: float, may_borrow: bool, reduces: bool, is_one_of_many: bool, contributes: bool
    ) -> bool:
        """Prepare for a backward. Returns whether the group has a trainable parameter.

        Args:
            divide_by: the divisor of the summed gradients.
            may_borrow: a large gradient may be sent from where autograd left it; nothing writes to it then.
            reduces: this backward ends with a reduction.
            is_one_of_many: this backward is inside `accumulate`.
            contributes: the gradients count. If False, they are dropped as they come.
        """
        self._contributes = contributes
        self.is_expecting = True
        if contributes and self._observer is None:
            self._hooks.expect()
        self.num_expected = num_trainable(self._group.parameters)
        self.expects_all = self.num_expected == len(self._group.parameters)
        if self.num_expected != len(self._hooks.order):
            self._hooks.forget()  # others are trained now
        self._waits_for_reduction = self._plan.collects_late and reduces
        self._dtype = self.summed_in if is_one_of_many and not reduces else self._group.reduce_dtype
        self._borrows = may_borrow and self._plan.may_borrow
        if (self._borrows, divide_by) not in self._scales:
            self._scales[self._borrows, divide_by] = self._plan.scale_for(divide_by, self._borrows)
        self.scale = self._scales[self._borrows, divide_by]
        return self.num_expected > 0

    @property
    def summed_in(self) -> torch.dtype:
        """The dtype in which many micro-batches are added up: the shards', if the reduce dtype is narrower."""
        return torch.promote_types(self._group.reduce_dtype, self._group.dtype)

    def _told_of(self, index: int, unsharded: torch.Tensor) -> None:
        """Take the gradient of `unsharded`, the group's parameter `index`, and all that were noted before."""
        if unsharded.grad is None:
            return  # frozen since its forward: autograd calls the hook and accumulates nothing
        if not self.is_expecting:
            self._begin()
        self._hooks.noted.append(unsharded)
        self._take()
        if self._hooks.ends and self._hooks.ends.get(index) != self._arrived:
            self._hooks.forget()  # a gradient is missing, or comes in another order
        is_complete = len(self._arrived) >= self.num_expected
        if is_complete:
            self._hooks.rest()
        # What is added to earlier backwards' gradients does not wait for the reduction, even if it collects late.
        waits = self._waits_for_reduction and self._rows is None
        if not waits and (is_complete or sum(each.nbytes for each in self._waiting.values()) >= self._plan.batch_bytes):
            self.collect()
        if is_complete:
            self._arrived.clear()
            self._complete()

    def _take(self) -> None:
        """Take the gradients of the noted parameters. They wait, or one is borrowed as the rows."""
        gradients: dict[int, torch.Tensor] = {}
        for index, unsharded in self._hooks.take():
            if self._observer is not None:
                self._observer.arrives(index, unsharded)
            self.came_twice |= index in self._came
            # Taken off the parameter, or autograd would add the next gradient in place, to memory that may be on its
            # way as borrowed rows.
            gradient, unsharded.grad = unsharded.grad, None
            if gradient is not None:  # None where autograd added a second gradient to the first, which is taken
                self._came[index] = None
                is_dense = self._is_plain and type(gradient) is torch.Tensor and gradient.layout is torch.strided
                gradients[index] = gradient if is_dense else as_dense(gradient, self._group, index)
        if not self._waiting.keys().isdisjoint(gradients):
            # The second gradient of a parameter, from another reentrant checkpoint, is added to the first in the rows.
            self.collect()
        self._arrived.update(gradients)
        if self._contributes and self._rows is None and self._borrows and self._can_be_rows(*gradients.values()):
            self._rows = ReduceBuffer.borrowed(self._group, *gradients.values())
            if self._observer is not None:
                self._observer.borrowed()
        elif self._contributes:
            self._waiting.update(gradients)

    def _can_be_rows(self, gradient: torch.Tensor) -> bool:  # the group's only one
        return self._plan.borrows(gradient.dtype) and gradient.is_contiguous() and not gradient.requires_grad

    def collect(self) -> None:
        """Copy all waiting and noted gradients into the rows."""
        if self._hooks.noted:
            self._take()
        if not self._waiting:
            return
        if self._observer is None:
            self._copy()
        else:
            self._observer.copy(self._copy)

    def _copy(self) -> None:
        if self._group.takes_any_gradient:
            self._widen(each.dtype for each in self._waiting.values())
        rows = self._rows_to_fill()
        waiting, self._waiting = self._waiting, {}
        rows.fill(waiting, self.scale.before)

    def _widen(self, dtypes: Iterable[torch.dtype]) -> None:
        """Let the rows have a dtype that holds these, and what they have already."""
        self._dtype = reduce(torch.promote_types, dtypes, self._dtype)
        if (rows := self._rows) is not None and rows.buffer.tensor.dtype != self._dtype:
            self._rows = None
            self._rows_to_fill().copy(rows)
            self.give_back(rows)

    def _rows_to_fill(self) -> ReduceBuffer:
        if self._rows is None:
            spare = self._spare.get(self._dtype)
            self._rows = spare.pop() if spare else ReduceBuffer.freed(self._group, self._plan, self._dtype, self._lane)
        return self._rows

    def end_backward(self) -> None:
        """Note the end of the backward. Gradients that no reduction took stay in the rows, and the next are added."""
        if self._waiting or self._hooks.noted:
            self.collect()
        self._hooks.rest()
        if self._came:
            came_once = not self.came_twice and len(self._came) == self.num_expected
            self._hooks.learn(tuple(self._came) if came_once else ())
        self.is_expecting = self.came_twice = self.was_taken = False
        self._arrived.clear()
        self._came.clear()

    # A reduction

    def take(self, even_if_empty: bool) -> ReduceBuffer | None:
        """Returns the rows for a reduction, which returns them. Without gradients: None, or empty rows if asked."""
        if self._waiting or self._hooks.noted:
            self.collect()
        self._arrived.clear()
        self.was_taken = True
        rows = self._rows_to_fill() if even_if_empty and self._rows is None else self._rows
        self._rows = None
        return rows

    def have_zeros(self) -> None:
        """Have rows for the next reduction. Without gradients they are zero."""
        self._rows = self._rows_to_fill()

    def give_back(self, rows: ReduceBuffer) -> None:
        """Free the memory of `rows`, and keep their views for the next reduction."""
        # Compute is ordered after the reduction, unless the reduce lane owns the rows: it reuses memory in its order.
        if self._observer is not None:
            self._observer.gives_back()
        if rows.buffer.is_ours:
            rows.filled.clear()
            rows.buffer.free()
            self._spare.setdefault(rows.buffer.tensor.dtype, []).append(rows)

    # What has arrived

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        return self._group.parameters

    @property
    def has_any(self) -> bool:
        return bool(self._waiting or self._hooks.noted or (self._rows is not None and self._rows.filled))

    @property
    def has_received(self) -> bool:
        return bool(self._came or self._hooks.noted)

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields every buffer and gradient, freed buffers too: what a memory report counts."""
        for gradient in (*(each.grad for each in self._hooks.noted), *self._waiting.values()):
            if gradient is not None:
                yield MemoryKind.ARRIVED, gradient
        if self._rows is not None:
            yield MemoryKind.GRADIENT_ROWS, self._rows.buffer.tensor

    @contextmanager
    def observed(self, observer: GradientObserver) -> Iterator[None]:
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    # Giving up

    def drop(self) -> None:
        if self._hooks.noted:
            self._take()
        self._waiting.clear()
        if self._rows is not None:
            rows, self._rows = self._rows, None
            self.give_back(rows)

    def drop_of(self, indices: frozenset[int]) -> None:
        self.collect()
        if self._rows is not None:
            self._rows.filled -= indices
            if not self._rows.filled:
                self.drop()
