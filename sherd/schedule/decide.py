"""The decision: a pure step from a state and an event to the next state and the actions that lead to it.

    event             what happens
    BeforeForward     gather and await the unit, then gather the next units of the learnt order
    AfterForward      free the unit, shrink it, or keep it, as its spec says
    EndForward        free units that were gathered and not used; the pass teaches the order
    BeforeBackward    as BeforeForward, in backward order
    GradientsReady    start the unit's reduction, once fewer than `reduce_buffers` are in flight
    GroupPassed       free the group alone, if the unit was called once and is freed after backward; in its place
                      gather a group of the next unit
    AfterBackward     free the unit, and start its reduction if gradients are left
    EndBackward       free the rest, finish all reductions; the pass teaches the order

Recomputation (activation checkpointing) runs a forward inside backward. The unit stays unsharded after it, because its
backward follows at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sherd.schedule import actions as do
from sherd.schedule.actions import Action, Event
from sherd.schedule.state import Keep, Live, Order, State

Decision = tuple[State, tuple[Action, ...]]


def decide(state: State, event: Event) -> Decision:
    """Returns the next state, and the actions that lead to it."""
    turn = _Turn(state)
    if not isinstance(event, do.GroupPassed):
        # Ranks pass groups at different moments, if they do. Before the next collective all have started the same ones.
        turn.gather_more()
    match event:
        case do.BeforeForward(unit, recomputing):
            turn.recompute(unit) if recomputing else turn.enter_forward(unit)
        case do.AfterForward(unit, recomputing, in_use):
            if not recomputing:
                turn.leave_forward(unit, in_use)
        case do.EndForward(differentiable):
            turn.end_forward(differentiable)
        case do.BeforeBackward(unit):
            turn.enter_backward(unit)
        case do.GradientsReady(unit):
            turn.reduce(unit)
        case do.GroupPassed(unit, group):
            turn.free_group(unit, group)
        case do.AfterBackward(unit, unreduced):
            turn.leave_backward(unit, unreduced)
        case do.EndBackward(last):
            turn.end_backward(last)
        case do.Unshard(unit, wait):
            turn.gather(unit, again=True)
            if wait:
                turn.wait(unit)
        case do.Reshard(unit):
            turn.free(unit)
        case do.Reset(gradients):
            turn.reset(gradients)
    return turn.state, tuple(turn.actions)


class _Turn:
    """A decision under way: the state and the actions so far."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[Action] = []

    # Forward

    def enter_forward(self, unit: int) -> None:
        self._make_unsharded((unit, *self.state.specs[unit].tied_owners))
        running = self.state.running | {unit}
        self.state = replace(self.state, forward=self.state.forward.after(unit), running=running)
        explicit = self.state.specs[unit].forward_prefetch
        self._prefetch(explicit, self.state.forward.upcoming(), self.state.limits.forward_depth)

    def leave_forward(self, unit: int, in_use: bool) -> None:
        running = self.state.running - {unit}
        self.state = replace(self.state, finished=self.state.finished.after(unit), running=running)
        if unit in self.state.borrowed or in_use:
            return  # another unit, or backward, may still need the unit: it is freed when the entire forward ends
        self._release(unit)

    def end_forward(self, differentiable: bool) -> None:
        for unit, live in enumerate(self.state.live):
            keep = self.state.specs[unit].after_forward
            if live is Live.GATHERING or (keep is Keep.FOR_BACKWARD and not differentiable):
                self.free(unit)
        for unit in sorted(self.state.borrowed):
            self._release(unit)
        self.state = replace(self.state, forward=self.state.forward.rewound(), finished=self.state.finished.rewound())

    def _release(self, unit: int) -> None:
        """Free or shrink `unit` after its forward, as its spec says."""
        keep = self.state.specs[unit].after_forward
        if keep is Keep.NOTHING:
            self.free(unit)
        elif keep is Keep.PART and self.state.live[unit] is Live.UNSHARDED:
            self.actions.append(do.Shrink(unit))
            self.state = self.state.with_live(unit, Live.SHRUNK)

    # Backward

    def recompute(self, unit: int) -> None:
        self.gather(unit, again=True)
        self.enter_backward(unit)

    def enter_backward(self, unit: int) -> None:
        spec = self.state.specs[unit]
        if spec.unshard_in_backward:
            self._make_unsharded((unit, *spec.tied_owners))
        if unit in self.state.entered:
            return
        order = self.state.backward
        if not order.learnt and order.strayed is None:
            order = Order(learnt=self.state.finished.learnt[::-1])
        self.state = replace(self.state, backward=order.after(unit), entered=self.state.entered | {unit})
        if not self.state.limits.after_backward:
            before = len(self.actions)
            self._prefetch_backward(unit)
            if unit in self.state.parted:
                self._gather_in_parts(unit, before)

    def _gather_in_parts(self, unit: int, before: int) -> None:
        """Have the last gather after the first `before` actions take memory as groups of `unit` free some."""
        self.state = replace(self.state, parted=self.state.parted - {unit})
        match self.actions[before:]:
            case [*_, do.Gather(ahead)] if (spec := self.state.specs[ahead]).num_parts > 1:
                self.actions[-1] = do.Gather(ahead, min(self.state.specs[unit].num_parts, spec.num_parts) - 1)
                self.state = replace(self.state, partly=ahead)

    def _prefetch_backward(self, unit: int) -> None:
        upcoming = [ahead for ahead in self.state.backward.upcoming() if self.state.specs[ahead].unshard_in_backward]
        explicit = self.state.specs[unit].backward_prefetch
        self._prefetch(explicit, upcoming, self.state.limits.backward_depth)

    def reduce(self, unit: int) -> None:
        if not self.state.specs[unit].reduces:
            return
        if unit in self.state.reducing:
            self.finish_reduce(unit)
        most = self.state.limits.reduce_buffers
        while self.state.reducing and len(self.state.reducing) >= most:
            self.finish_reduce(self.state.reducing[0])
        self.actions.append(do.Reduce(unit))
        self.state = replace(self.state, reducing=(*self.state.reducing, unit))
        if most == 0:
            self.finish_reduce(unit)

    def finish_reduce(self, unit: int) -> None:
        self.actions.append(do.FinishReduce(unit))
        self.state = replace(self.state, reducing=tuple(other for other in self.state.reducing if other != unit))

    def leave_backward(self, unit: int, unreduced: bool) -> None:
        # The unit is freed before its reduction starts, so that the two never add up in the peak:
        # test_a_unit_is_freed_before_its_reduction_starts_so_that_the_two_never_add_up.
        if self._goes_after_backward(unit):
            self.free(unit)
        if unreduced:
            self.reduce(unit)
        if self.state.limits.after_backward:
            self._prefetch_backward(unit)

    def free_group(self, unit: int, group: int) -> None:
        # Each of several calls may be recomputed, and gathers a freed group again: this rank alone does, if other
        # ranks lack the gradient after which the group is freed:
        # test_no_group_goes_alone_of_a_unit_that_was_called_twice_and_may_be_recomputed_once_more.
        is_called_once = self.state.forward.learnt.count(unit) <= 1
        if is_called_once and self._goes_after_backward(unit) and self.state.live[unit] is Live.UNSHARDED:
            self.actions.append(do.FreeGroup(unit, group))
            self.state = replace(self.state, passed=self.state.passed | {unit})
            if group <= 1 < self.state.specs[unit].num_parts:
                self.state = replace(self.state, parted=self.state.parted | {unit})
                self.actions.append(do.Collect(unit))
            self.gather_more(max(group - 1, 0))

    def _goes_after_backward(self, unit: int) -> bool:
        """Returns whether `unit` is freed after its backward.

        A tied owner of another unit is freed when the entire backward ends. A unit whose forward is under way, with a
        backward inside, is freed after its forward.
        """
        is_needed = unit in self.state.borrowed or unit in self.state.running
        return self.state.specs[unit].reshard_after_backward and not is_needed

    def end_backward(self, last: bool) -> None:
        running = self.state.running
        for unit, live in enumerate(self.state.live):
            is_intact = live is Live.UNSHARDED and unit not in self.state.passed
            if unit in running or (running and unit in self.state.borrowed):
                continue
            if not is_intact or self.state.specs[unit].reshard_after_backward:
                self.free(unit)
        if last:
            for unit in self.state.reducing:
                self.finish_reduce(unit)
        backward = self.state.backward
        # A backward inside a forward is not the one whose order the next step will follow.
        backward = Order(backward.learnt) if running else backward.rewound()
        self.state = replace(self.state, backward=backward, entered=frozenset())

    # Any time

    def gather(self, unit: int, again: bool = False) -> None:
        """Gather `unit`. `again`: gather groups that backward has freed, too, because they are read again."""
        if self.state.live[unit] in (Live.SHARDED, Live.SHRUNK) or (again and unit in self.state.passed):
            self.actions.append(do.Gather(unit))
            self.state = self.state.with_live(unit, Live.GATHERING)

    def gather_more(self, left: int = 0) -> None:
        """Go on with the gather in parts, if there is one, until `left` groups are left."""
        if (unit := self.state.partly) is not None:
            self.actions.append(do.GatherMore(unit, min(left, self.state.specs[unit].num_parts - 1)))
            self.state = replace(self.state, partly=unit if left else None)

    def wait(self, unit: int) -> None:
        if self.state.live[unit] is Live.GATHERING:
            self.actions.append(do.Await(unit))
            self.state = self.state.with_live(unit, Live.UNSHARDED)

    def free(self, unit: int) -> None:
        if self.state.live[unit] is not Live.SHARDED:
            self.actions.append(do.Free(unit))
            self.state = self.state.with_live(unit, Live.SHARDED)

    def reset(self, gradients: bool) -> None:
        for unit in range(len(self.state.specs)):
            self.free(unit)
            if gradients:
                self.actions.append(do.Discard(unit))
        if gradients:
            self.state = replace(self.state, reducing=())
        self.state = replace(
            self.state,
            forward=Order(self.state.forward.learnt),
            finished=Order(self.state.finished.learnt),
            backward=Order(self.state.backward.learnt),
            entered=frozenset(),
            running=frozenset(),
        )

    def _make_unsharded(self, units: tuple[int, ...]) -> None:
        """Gather `units`. All gathers are started before the first one is waited for."""
        for unit in units:
            self.gather(unit)
        for unit in units:
            self.wait(unit)

    def _prefetch(self, explicit: tuple[int, ...] | None, upcoming: Iterable[int], depth: int) -> None:
        if explicit is not None:
            for unit in explicit:
                self.gather(unit)
            return
        limit = self.state.limits.bytes_in_flight
        for unit in list(dict.fromkeys(upcoming))[:depth]:
            if limit is None or self.state.bytes_in_flight + self.state.specs[unit].unsharded_bytes <= limit:
                self.gather(unit)
