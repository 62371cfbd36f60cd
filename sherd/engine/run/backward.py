"""The gradients of one unit as they arrive in a backward: which have come, and what may be done once they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from sherd.engine.moves.arrivals import Arrivals
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.weights import Weights
from sherd.policy import UnitPolicy

WhenComplete = Callable[[int | None, bool], None]
"""`when_complete(group, is_done)`: all gradients of the group of that number are there; None: of the last one, so of
the unit. `is_done`: nothing in this backward will read its parameters again."""

RECOMPUTED = -1
"""Stands among the numbers of groups for a recomputation of the unit."""


class Backward:
    """One unit's part in the present backward, and what the last one has taught.

    It `is_entered` once backward has reached the unit, and `is_recorded` if a part of it was run with gradients
    enabled. `enter_backward()` tells the runtime that backward is there, and came through none of the unit's outputs:
    through a loss that a module has kept for itself, a weight that was used after `unshard()`, a gradient of a
    gradient. Sums of gradients are divided by `num_ranks`, unless the policy says otherwise. The groups that are
    `unflagged` are left out of a reduction where they have no gradients, which the other ranks are not told.
    """

    def __init__(self, enter: Callable[[], None], num_ranks: int) -> None:
        self.is_entered = self.is_recorded = False
        self.enter_backward = enter
        self._num_ranks = float(num_ranks)
        self._weights: Sequence[Weights] = ()
        self._gradients: Sequence[Gradients] = ()
        self.unflagged: list[Arrivals] = []
        self._when_complete: WhenComplete | None = None
        self._num_expected = self._num_completed = self.num_trained = 0
        self._seen: list[int] = []
        self._is_gone_through_once = self.is_under_other_hooks = False

    def regroup(self, weights: Sequence[Weights], gradients: Sequence[Gradients]) -> None:
        """Have these groups from now on. What was learnt of the former ones is forgotten."""
        self._weights, self._gradients = weights, gradients
        self.unflagged = [each.arrivals for each in gradients if not each.group.num_flags]
        self._seen = []
        self._is_gone_through_once = False

    def completed(self, group: int) -> Callable[[], None]:
        """Returns what that group calls when every one of its trainable parameters has its gradient."""
        return partial(_group_completed, weakref.ref(self), group)  # weak: the groups are held here

    # What a backward brings

    def runs_under_other_hooks(self) -> None:
        """Hooks of others have been given what the unit's forward saves: they may run a part of it again in
        backward."""
        self.is_under_other_hooks = True

    def expect(self, policy: UnitPolicy, when_complete: WhenComplete) -> None:
        """Prepare for the gradients of a backward that is about to reach the unit.

        Args:
            policy: whether it reduces, and how.
            when_complete: called for each group whose trainable parameters all have their gradient.
        """
        self.is_entered = True
        self.is_recorded |= torch.is_grad_enabled()
        self._when_complete = when_complete
        self._num_completed = self.num_trained = 0
        self._num_expected = self._expect_of(self._gradients, policy)

    def _expect_of(self, expected: Sequence[Gradients], policy: UnitPolicy) -> int:
        """Prepare the groups `expected`. Returns how many of them have a trainable parameter."""
        divide_by = self._num_ranks if policy.divide_factor is None else policy.divide_factor
        may_borrow, is_one_of_many = policy.reduce_scatter is None, policy.accumulation is not None
        num_expected = 0
        for gradients in expected:
            num_expected += gradients.arrivals.expect(
                divide_by, may_borrow, policy.reduce_gradients, is_one_of_many, policy.contributes
            )
            self.num_trained += gradients.arrivals.num_expected
        return num_expected

    @contextmanager
    def reducing_for_others(self, policy: UnitPolicy) -> Iterator[None]:
        """Inside, a reduction finds everything as in a backward, also where none has come to the unit."""
        idle = [gradients for gradients in self._gradients if not gradients.arrivals.is_expecting]
        self._expect_of(idle, policy)
        try:
            yield
        finally:
            for gradients in idle:
                gradients.arrivals.end_backward()

    def recompute_begins(self) -> None:
        """Note that a forward of the unit begins inside backward: activation checkpointing."""
        self._seen.append(RECOMPUTED)

    def leave(self) -> None:
        """Note that backward has passed the unit. It may come again, to what another forward has saved."""
        self.is_entered = False

    def end(self) -> None:
        """Note that backward is over: what has not come will not come."""
        self.is_entered = self.is_recorded = False
        self._when_complete = None
        self._num_completed = 0
        if self._seen:
            came_twice = True in [gradients.arrivals.came_twice for gradients in self._gradients]
            self._is_gone_through_once = len(set(self._seen)) == len(self._seen) and not came_twice
            self._seen.clear()
        for gradients in self._gradients:
            gradients.arrivals.end_backward()
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
            completed = None if is_last else group
            self._when_complete(completed, self._is_done(completed))

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for a reduction, or for half of one."""
        for gradients in self._gradients:
            gradients.drop_unreduced()

    # What is known of it

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for a reduction, or for the other half of one."""
        return any(gradients.partial is not None or gradients.arrivals.has_any for gradients in self._gradients)

    def awaits_reduction(self, policy: UnitPolicy, brings_gradients: Callable[[], bool]) -> bool:
        """Returns whether the unit is to take part in a reduction: gradients wait for the one that this backward is to
        have, or other ranks may have gradients that are missing here. Sums over the shard axis may wait for a later
        one.

        With none here, other ranks may have some if backward has gone through the unit, its reduction allows for ranks
        without any, and `brings_gradients()` says that this is a backward for parameters. Those ranks reduce it now, so
        this one does: test_a_rank_that_uses_none_of_a_unit_reduces_it_in_its_turn.
        """
        was_reduced = True
        for gradients in self._gradients:
            if gradients.arrivals.has_any or (gradients.partial is not None and policy.all_reduce_gradients):
                return True
            was_reduced = was_reduced and gradients.arrivals.was_taken
        if was_reduced or not self.is_entered or not policy.reduce_gradients:
            return False
        return any(gradients.may_lack(policy) for gradients in self._gradients) and brings_gradients()

    def lacking(self, present: int) -> list[str]:
        """Returns the parameters of the `unflagged` groups that have no gradients. `present` has a bit for each group,
        the last one's lowest, which is 1 if it has."""
        absent = [at for at in range(len(self.unflagged)) if not present >> (len(self.unflagged) - 1 - at) & 1]
        return [parameter.name for at in absent for parameter in self.unflagged[at].parameters]

    def lack_nothing(self, present: int) -> None:
        """Have gradients, of zeros, for those `unflagged` groups that have them on another rank: it says so with
        `present`, as above."""
        for at, arrivals in enumerate(reversed(self.unflagged)):
            if present >> at & 1:
                arrivals.have_zeros()

    @property
    def has_received(self) -> bool:
        """Whether any gradient has come in the present backward."""
        return any(gradients.arrivals.has_received for gradients in self._gradients)

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward will bring gradients for the unit."""
        return any(weights.awaits_gradients for weights in self._weights)

    def _is_done(self, group: int | None) -> bool:
        """Returns whether nothing in backward will read the unsharded parameters of `group` again, or of the unit
        (None), now that all their gradients are there.

        A parameter's gradient is complete once every use of it that leads to that gradient has been gone through. What
        else may read it is a frozen parameter, on the way to the inputs, or a view cut off from its gradient
        (`w.detach()`).

        False until one backward was observed in which no gradient arrived twice: autograd makes two gradients, each a
        complete one, of a tensor that is used in two reentrant checkpoints, and reads it again in between. False for a
        group alone if a checkpoint may yet run a part of forward again, for the gradients of other groups: it reads
        whatever forward has read.
        """
        if not self._is_gone_through_once or (group is not None and self.is_under_other_hooks):
            return False
        for chosen in range(len(self._weights)) if group is None else (group,):
            if not (self._gradients[chosen].arrivals.expects_all and self._weights[chosen].is_unread):
                return False
        return True


def _group_completed(backward: weakref.ref[Backward], group: int) -> None:
    alive = backward()
    if alive is not None:
        alive.complete(group)
