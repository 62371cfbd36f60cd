"""The gradients of one group as autograd brings them, until a reduction takes them.

autograd ──noted──▶ waiting, as they came ──1 MiB, or all──▶ rows of a reduce buffer ──take──▶ reduction
                                                             ▲
                    a large one, alone in its group ──────────┘ borrowed: it is its own rows
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import attrgetter
from typing import Protocol

import torch
from torch import nn

from sherd._torch import dynamo_disabled, exchangeable_hook
from sherd.comm.streams import Lane
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.dense_gradient import as_dense
from sherd.engine.moves.reduce_buffer import ReduceBuffer
from sherd.engine.moves.scale import Scale
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, num_trainable
from sherd.schedule.moments import MemoryKind


class GradientObserver(Protocol):
    """Sees the gradients of one group as they come."""

    def arrives(self, index: int, unsharded: torch.Tensor) -> None:
        """The parameter `unsharded`, of that index in the group, has a gradient that nobody has taken yet."""

    def borrowed(self) -> None:
        """The gradient that came last is the rows now."""

    def copy(self, copy: Callable[[], None]) -> None:
        """Have gradients that waited copied into the rows, by `copy()`."""

    def gives_back(self) -> None:
        """The rows of a reduction are about to be freed."""


NBYTES = attrgetter("nbytes")

Told = Callable[[torch.Tensor], None]


class GradientHooks:
    """The hooks on one group's unsharded parameters. Python is told of each gradient, until two backwards have brought
    them in one `order`; from then on of the last of those that are copied together. The others are noted in C.

    `noted`: the parameters whose gradients have come and were not taken yet; they stay where autograd has put them.
    `ends`, if they are learnt: by each gradient that is told of, those that are to have come by then. Unless the hooks
    `may_note`, each gradient is told of always.
    """

    def __init__(self, plan: BufferPlan, may_note: bool) -> None:
        self.noted: list[torch.Tensor] = []
        self._plan, self._may_note = plan, may_note
        self._hooks: dict[int, tuple[Callable[[Told], None], Told]] = {}
        self._indices: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self.order: tuple[int, ...] = ()
        self.ends: dict[int, Set[int]] = {}

    def watch(self, index: int, parameter: torch.Tensor, told: Told) -> None:
        """Have `told` be called with `parameter`, the group's of that index, when it has a gradient."""
        exchange = exchangeable_hook(parameter, told)
        # In two dtypes there are two forms of each parameter, and what is learnt of the one is no good for the other.
        self._may_note &= index not in self._hooks
        self.forget()
        self._hooks[index] = exchange, told
        self._indices[id(parameter)], self._nbytes[index] = index, parameter.nbytes

    def expect(self) -> None:
        """Note gradients from now on, if their order is learnt."""
        note = self.noted.append
        for index, (exchange, _) in self._hooks.items() if self.ends else ():
            if index not in self.ends:
                exchange(note)

    def take(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the parameters that are `noted`, each with its index, in the order in which their gradients came."""
        noted, self.noted[:] = self.noted[:], ()
        return list(zip(map(self._indices.__getitem__, map(id, noted)), noted, strict=True))

    def rest(self) -> None:
        """Tell of each gradient from now on, as between backwards, when one may come though nobody expects it."""
        for exchange, told in self._hooks.values() if self.ends else ():
            exchange(told)

    def learn(self, order: tuple[int, ...]) -> None:
        """Learn from a backward in which all gradients came once, in this `order`; it is empty if they did not."""
        if order != self.order:
            self.forget()
        elif not self.ends and self._may_note:
            self.ends = self._plan.ends_of(order, self._nbytes)
        self.order = order

    def forget(self) -> None:
        """Tell of each gradient, until their order is learnt anew."""
        self.rest()
        self.ends, self.order = {}, ()


class Arrivals:
    """One group's gradients that no reduction has taken yet. `begin()` is called when one comes though nobody has said
    `expect`, `complete()` when every trainable parameter has had its gradient. `lane` is that of the reductions.

    `scale` turns the sum over all ranks into their mean. In the present backward: `came_twice`, two gradients of one
    parameter have come; `was_taken`, a reduction was started; `expects_all`, all parameters are trainable.
    """

    def __init__(
        self, group: Group, plan: BufferPlan, lane: Lane, begin: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        self._group = group
        self._plan = plan
        self._lane = lane if plan.lane_owns_rows else None
        self._begin = begin
        self._complete = complete
        self._observer: GradientObserver | None = None
        self._waiting: dict[int, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._rows: ReduceBuffer | None = None
        self._spare: list[ReduceBuffer] = []
        self._arrived: set[int] = set()
        self._came: dict[int, None] = {}  # in the order in which they came
        self.came_twice = self.was_taken = False
        self.num_expected, self.expects_all = 0, False
        self.is_expecting, self._contributes = False, True
        self._borrows = False
        self._waits_for_reduction = plan.collects_late
        self._dtype = group.reduce_dtype
        self.scale = Scale(1.0, 1.0)
        self._scales: dict[tuple[bool, float], Scale] = {}
        # A tensor subclass may need a collective to be made dense, which all ranks are to do in the same turn.
        is_plain = all(each.unsharded_spec is None and each.restored is None for each in group.parameters)
        self._hooks = GradientHooks(plan, may_note=is_plain and not group.gathers_itself)

    def watch(self, index: int, parameter: nn.Parameter) -> None:
        """Take each gradient of `parameter`, the unsharded form of the group's parameter `index`."""
        if not parameter.dtype.is_floating_point and not parameter.dtype.is_complex:
            return
        this = weakref.ref(self)  # the parameter holds its hook, and its group's buffers hold the parameter

        @dynamo_disabled
        def arrived(unsharded: torch.Tensor) -> None:
            arrivals = this()
            if arrivals is not None:
                arrivals._told_of(index, unsharded)

        self._hooks.watch(index, parameter.requires_grad_(True), arrived)
        parameter.requires_grad_(self._group.parameters[index].requires_grad)

    # A backward

    def expect(
        self, divide_by: float, may_borrow: bool, reduces: bool, is_one_of_many: bool, contributes: bool
    ) -> bool:
        """Prepare for a backward. Returns whether the group has a trainable parameter.

        Args:
            divide_by: the divisor of the summed gradients.
            may_borrow: a large gradient may be sent from where autograd left it; nobody writes to it then.
            reduces: this backward ends with a reduction.
            is_one_of_many: it is inside `accumulate`.
            contributes: its gradients count. If not, they are dropped as they come.
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
        scale = self._scales.get((self._borrows, divide_by))
        if scale is None:
            scale = self._scales[self._borrows, divide_by] = self._plan.scale_for(divide_by, self._borrows)
        self.scale = scale
        return self.num_expected > 0

    @property
    def summed_in(self) -> torch.dtype:
        """The dtype in which many micro-batches are added up: the shards', if the reduce dtype is narrower."""
        return torch.promote_types(self._group.reduce_dtype, self._group.dtype)

    def _told_of(self, index: int, unsharded: torch.Tensor) -> None:
        """Take the gradient of `unsharded`, the group's parameter `index`, and those that were noted before."""
        if unsharded.grad is None:
            return  # frozen since its forward: autograd has come here and accumulated nothing
        if not self.is_expecting:
            self._begin()
        self._hooks.noted.append(unsharded)
        self._take()
        if self._hooks.ends and self._hooks.ends.get(index) != self._arrived:
            self._hooks.forget()  # one is missing, or comes in another turn
        is_complete = len(self._arrived) >= self.num_expected
        if is_complete:
            self._hooks.rest()
        # What is added to earlier backwards' gradients does not wait for the reduction, even if it collects late.
        waits = self._waits_for_reduction and self._rows is None
        if not waits and (is_complete or self._waiting_bytes >= self._plan.batch_bytes):
            self.collect()
        if is_complete:
            self._arrived.clear()
            self._complete()

    def _take(self) -> None:
        """Take the gradients of the parameters that were noted. They wait, or are borrowed as the rows."""
        gradients: dict[int, torch.Tensor] = {}
        for index, unsharded in self._hooks.take():
            if self._observer is not None:
                self._observer.arrives(index, unsharded)
            self.came_twice |= index in self._came
            gradient, unsharded.grad = unsharded.grad, None
            if gradient is not None:  # as it is where autograd has added a second one to the first
                self._came[index] = None
                is_dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
                gradients[index] = gradient if is_dense else as_dense(gradient, self._group.parameters[index])
        if not self._waiting.keys().isdisjoint(gradients):
            # A second one in the same backward, from another reentrant checkpoint: it is added to the first, which must
            # be in the rows for that.
            self.collect()
        self._arrived.update(gradients)
        if self._contributes and self._rows is None and self._borrows and self._can_be_rows(*gradients.values()):
            self._rows = ReduceBuffer.borrowed(self._group, *gradients.values())
            if self._observer is not None:
                self._observer.borrowed()
        elif self._contributes:
            self._waiting.update(gradients)
            self._waiting_bytes += sum(map(NBYTES, gradients.values()))

    def _can_be_rows(self, gradient: torch.Tensor) -> bool:
        """Returns whether `gradient`, the group's only one, is laid out and typed as it will be sent."""
        return self._plan.borrows(gradient.dtype) and gradient.is_contiguous() and not gradient.requires_grad

    def collect(self) -> None:
        """Copy what waits into the rows, and what is noted."""
        if self._hooks.noted:
            self._take()
        if not self._waiting:
            return
        if self._observer is None:
            self._copy()
        else:
            self._observer.copy(self._copy)

    def _copy(self) -> None:
        rows = self._rows_to_fill()
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        rows.fill(waiting, self.scale.before)

    def _rows_to_fill(self) -> ReduceBuffer:
        """Returns the rows; new ones, in spare memory if there is any, if nothing was copied yet."""
        if self._rows is None:
            for number, spare in enumerate(self._spare):
                if spare.buffer.tensor.dtype == self._dtype:
                    self._rows = spare
                    del self._spare[number]
                    return spare
            self._rows = ReduceBuffer.made(self._group, self._plan, self._dtype, self._lane)
        return self._rows

    def end_backward(self) -> None:
        """Note that the backward is over: gradients that did not come will not come. Those that no reduction has taken
        wait in the rows, where the next backward's are added to them."""
        if self._waiting or self._hooks.noted:
            self.collect()
        self._hooks.rest()
        if self._came:
            came_once = not self.came_twice and len(self._came) == self.num_expected
            self._hooks.learn(tuple(self._came) if came_once else ())
        self.is_expecting = self.came_twice = self.was_taken = False
        self._arrived.clear()
        self._came.clear()

    # What a reduction does

    def take(self, even_if_empty: bool) -> ReduceBuffer | None:
        """Returns the rows, for a reduction, which gives them back; None, or empty ones, if nothing has come."""
        if self._waiting or self._hooks.noted:
            self.collect()
        self._arrived.clear()
        self.was_taken = True
        rows = self._rows_to_fill() if even_if_empty and self._rows is None else self._rows
        self._rows = None
        return rows

    def have_zeros(self) -> None:
        """Have rows for the next reduction, of zeros if nothing has come."""
        self._rows = self._rows_to_fill()

    def give_back(self, rows: ReduceBuffer) -> None:
        """Note that a reduction has read `rows`, or is queued on the lane that owns them: their memory is freed, their
        views are kept for the next one."""
        if self._observer is not None:
            self._observer.gives_back()
        if rows.buffer.is_ours:
            rows.filled.clear()
            rows.buffer.free()
            self._spare.append(rows)

    # What is here

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        """The parameters whose gradients come here."""
        return self._group.parameters

    @property
    def has_any(self) -> bool:
        """Whether any gradient is here."""
        return bool(self._waiting or self._hooks.noted or (self._rows is not None and self._rows.filled))

    @property
    def has_received(self) -> bool:
        """Whether one has come in the present backward."""
        return bool(self._came or self._hooks.noted)

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields everything that is here, freed buffers too: what a memory report counts."""
        for gradient in (*(each.grad for each in self._hooks.noted), *self._waiting.values()):
            if gradient is not None:
                yield MemoryKind.ARRIVED, gradient
        if self._rows is not None:
            yield MemoryKind.GRADIENT_ROWS, self._rows.buffer.tensor

    @contextmanager
    def observed(self, observer: GradientObserver) -> Iterator[None]:
        """Have `observer` see each gradient that comes inside the context."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    # Giving up

    def drop(self) -> None:
        """Drop all gradients that are here."""
        if self._hooks.noted:
            self._take()
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._rows is not None:
            rows, self._rows = self._rows, None
            self.give_back(rows)

    def drop_of(self, indices: frozenset[int]) -> None:
        """Drop those of the parameters of these indices."""
        self.collect()
        if self._rows is not None:
            self._rows.filled -= indices
            if not self._rows.filled:
                self.drop()
