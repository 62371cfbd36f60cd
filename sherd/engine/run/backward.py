"""The gradients of one unit as they arrive in a backward: which have come, and what may be done once they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.policy import UnitPolicy

RECOMPUTED = -1
"""Stands among the numbers of groups for a recomputation of the unit."""


class Backward:
    """One unit's part in the present backward, and what the last one has taught.

    It `is_entered` once backward has reached the unit; it `has_reduced` once its reduction was started. `enter()` tells
    the runtime that backward is there.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        self.is_entered = self.has_reduced = False
        self._enter = enter
        self._weights: Sequence[Weights | SelfGatheredWeights] = ()
        self._gradients: Sequence[Gradients] = ()
        self._when_complete: Callable[[int | None], None] | None = None
        self._num_expected = self._num_completed = 0
        self._seen: list[int] = []
        self._is_gone_through_once = False

    def regroup(self, weights: Sequence[Weights | SelfGatheredWeights], gradients: Sequence[Gradients]) -> None:
        """Have these groups from now on. What was learnt of the former ones is forgotten."""
        self._weights, self._gradients = weights, gradients
        self._seen = []
        self._is_gone_through_once = False

    def completed(self, group: int) -> Callable[[], None]:
        """Returns what that group calls when every one of its trainable parameters has its gradient."""
        return partial(_group_completed, weakref.ref(self), group)  # weak: the groups are held here

    # What a backward brings

    def enter_backward(self) -> None:
        """Backward has reached the unit, and none of its outputs on the way: through a loss that a module has kept for
        itself, a weight that was used after `unshard()`, a gradient of a gradient."""
        self._enter()

    def expect(self, policy: UnitPolicy, divide_by: float, when_complete: Callable[[int | None], None]) -> None:
        """Prepare for the gradients of a backward that is about to reach the unit.

        Args:
            policy: whether it reduces, and how.
            divide_by: the divisor of the sum over all ranks.
            when_complete: called with each group whose trainable parameters all have their gradient, and with None when
                that is the last one.
        """
        self.is_entered = True
        self._when_complete = when_complete
        self._num_completed = 0
        may_borrow, is_one_of_many = policy.reduce_scatter is None, policy.accumulation is not None
        for gradients in self._gradients:
            gradients.expect(divide_by, may_borrow, policy.reduce_gradients, is_one_of_many)
        self._num_expected = sum([gradients.expects_any for gradients in self._gradients])

    def recompute_begins(self) -> None:
        """Note that a forward of the unit begins inside backward: activation checkpointing."""
        self._seen.append(RECOMPUTED)

    def note_reduced(self) -> None:
        """Note that the reduction was started."""
        self.has_reduced = True

    def leave(self) -> None:
        """Note that backward has passed the unit. It may come again, to what another forward has saved."""
        self.is_entered = False

    def discard(self) -> None:
        """Forget which groups are complete: their gradients were dropped."""
        self._num_completed = 0

    def end(self) -> None:
        """Note that backward is over: what has not come will not come."""
        self.has_reduced = self.is_entered = False
        self._when_complete = None
        self._num_completed = 0
        if self._seen:
            came_twice = any(gradients.came_twice for gradients in self._gradients)
            self._is_gone_through_once = len(set(self._seen)) == len(self._seen) and not came_twice
            self._seen.clear()
        for gradients in self._gradients:
            gradients.end_backward()
        for weights in self._weights:
            weights.end_backward()

    def complete(self, group: int) -> None:
        """Note that every trainable parameter of `group` has its gradient."""
        self._seen.append(group)
        self._num_completed += 1
        is_last = self._num_completed >= self._num_expected
        if is_last:
            self._num_completed = 0
        if self._when_complete is not None:
            self._when_complete(None if is_last else group)

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for a reduction, or for half of one."""
        for gradients in self._gradients:
            gradients.drop_unreduced()

    # What is known of it

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for a reduction, or for the other half of one."""
        return any(gradients.unreduced for gradients in self._gradients)

    def awaits_reduction(self, policy: UnitPolicy) -> bool:
        """Whether gradients wait for the reduction that this backward is to have. Sums over the shard axis may wait for
        a later one."""
        return any(gradients.awaits_reduction(policy) for gradients in self._gradients)

    @property
    def has_received(self) -> bool:
        """Whether any gradient has come in the present backward."""
        return any(gradients.has_received for gradients in self._gradients)

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward will bring gradients for the unit."""
        return any(weights.awaits_gradients for weights in self._weights)

    def is_owed(self, policy: UnitPolicy) -> bool:
        """Whether backward has reached the unit, no gradient has come, and its reduction allows for ranks that have
        none."""
        if self.has_reduced or not policy.reduce_gradients or not self.is_entered:
            return False
        return any(gradients.may_lack(policy) for gradients in self._gradients)

    @property
    def is_done(self) -> bool:
        """Whether, with all gradients there, nothing in backward will read the unit's unsharded parameters again.

        A parameter's gradient is complete once every use of it that leads to that gradient has been gone through. What
        else may read it is a frozen parameter, on the way to the inputs, or a view cut off from its gradient
        (`w.detach()`).

        False until one backward was observed in which no gradient arrived twice: autograd makes two gradients, each a
        complete one, of a tensor that is used in two reentrant checkpoints, and reads it again in between.
        """
        if not self._is_gone_through_once:
            return False
        pairs = zip(self._gradients, self._weights, strict=True)
        return all(gradients.expects_all and weights.is_unread for gradients, weights in pairs)

    def group_is_done(self, group: int) -> bool:
        """Whether that holds of `group`, which is a single tensor whose gradient is there."""
        gradients, weights = self._gradients[group], self._weights[group]
        is_single = len(weights.group.parameters) == 1
        return self._is_gone_through_once and is_single and gradients.expects_all and weights.is_unread


def _group_completed(backward: weakref.ref[Backward], group: int) -> None:
    alive = backward()
    if alive is not None:
        alive.complete(group)
