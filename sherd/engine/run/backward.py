"""One unit in a backward: which gradients have arrived, and when the unit may be reduced and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from sherd.engine.moves.gradients import Gradients, GradientStage
from sherd.engine.moves.saved import Offload
from sherd.engine.moves.weights import Weights
from sherd.policy import UnitPolicy

T = TypeVar("T")

WhenComplete = Callable[[int | None, bool], None]
"""`when_complete(group, is_done)`: all gradients of group number `group` have arrived, or of the unit (None).
`is_done`: nothing in this backward reads the parameters again."""

RECOMPUTED = -1
"""Stands for a recomputation of the unit among the numbers of groups."""


@dataclass(slots=True)
class ExpectedGradients:
    """The gradients that a backward is to bring for a unit.

    Attributes:
        num_groups: the groups with a trainable parameter.
        num_trained: the trainable parameters.
        reduces_when_complete: the unit is reduced as soon as all of its gradients have arrived. False if another rank
            may lack some: it reduces the unit when autograd is past the inputs, so all ranks do.
        when_complete: the call for a group that has all of its gradients; None after the backward.
    """

    num_groups: int
    num_trained: int
    reduces_when_complete: bool
    when_complete: WhenComplete | None


class Backward:
    """One unit's part in the present backward, and what the last backward taught.

    Sums of gradients are divided by `num_ranks`, unless the policy says otherwise.

    Attributes:
        is_entered: backward has reached the unit.
        is_recorded: a part of the unit's backward ran with gradients enabled.
        enter_backward: tells the runtime that backward is in the unit. Backward may come through none of the unit's
            outputs: through a loss that a module keeps, a weight used after `unshard()`, a gradient of a gradient.
        offload: what becomes of the tensors that the unit's forward saves; None: they stay where they are.
        number: how many backwards have ended, of a resumed training since its beginning.
        unflagged: the groups that a rank without their gradients leaves out of a reduction, untold by any flag.
        expected: of the present backward, or the last one.
    """

    def __init__(self, enter: Callable[[], None], num_ranks: int) -> None:
        self.is_entered = self.is_recorded = False
        self.enter_backward = enter
        self._num_ranks = float(num_ranks)
        self._weights: list[Weights] = []
        self._gradients: list[Gradients] = []
        self.unflagged: list[Gradients] = []
        self.expected = ExpectedGradients(0, 0, False, None)
        self._num_completed = 0
        self._seen: list[int] = []
        self._is_gone_through_once = self.is_under_other_hooks = False
        self.offload: Offload | None = None
        self.number = 0

    def regroup(self, weights: Sequence[Weights], gradients: Sequence[Gradients]) -> None:
        self._weights[:], self._gradients[:] = weights, gradients
        self.unflagged[:] = [each for each in gradients if not each.group.num_flags]
        self._seen.clear()
        self._is_gone_through_once = False

    def completed(self, group: int) -> Callable[[], None]:
        """Returns the function that group number `group` calls when all its trainable parameters have gradients."""
        return partial(if_alive, weakref.ref(self), partial(Backward.complete, group=group))

    def go_on(self, number: int) -> None:
        """Count backwards on from `number`."""
        self.number = number

    def offload_saved(self, offload: Offload | None) -> None:
        """Let the tensors that later forwards of the unit save go to host memory, or stay."""
        self.offload = offload

    # What a backward brings

    def runs_under_other_hooks(self) -> None:
        """Note that hooks of others get what the unit's forward saves, and may run parts of it again in backward."""
        self.is_under_other_hooks = True

    def expect(self, policy: UnitPolicy, when_complete: WhenComplete, is_alone: bool) -> None:
        """Prepare for the gradients of a backward that is about to reach the unit.

        Args:
            policy: the unit's policy.
            when_complete: called for each group when all its trainable parameters have gradients; not for the last one
                if that does not reduce the unit.
            is_alone: there is no other unit, whose collectives could come in between.
        """
        self.is_entered = True
        self.is_recorded |= torch.is_grad_enabled()
        self._num_completed = 0
        has_flags = self.unflagged != self._gradients
        reduces = is_alone or not (has_flags or policy.reduce_unused)
        self.expected = ExpectedGradients(*self._expect_of(self._gradients, policy), reduces, when_complete)

    def _expect_of(self, expected: Sequence[Gradients], policy: UnitPolicy) -> tuple[int, int]:
        """Prepare the groups `expected`. Returns the number of groups with trainable parameters, and that of these."""
        num_groups = num_trained = 0
        divide_by = self._num_ranks if policy.divide_factor is None else policy.divide_factor
        may_borrow, is_one_of_many = policy.reduce_scatter is None, policy.accumulation is not None
        if policy.accumulation is not None:
            divide_by *= policy.accumulation.num_averaged
        for gradients in expected:
            num = gradients.expect(divide_by, may_borrow, policy.reduce_gradients, is_one_of_many, policy.contributes)
            num_groups += num > 0
            num_trained += num
        return num_groups, num_trained

    @contextmanager
    def reducing_for_others(self, policy: UnitPolicy) -> Iterator[None]:
        """Prepare the unit for a reduction inside this context as a backward does, even if none reaches the unit."""
        idle = [gradients for gradients in self._gradients if gradients.stage is GradientStage.IDLE]
        self._expect_of(idle, policy)
        try:
            yield
        finally:
            for gradients in idle:
                gradients.end_backward()

    def recompute_begins(self) -> None:
        """Note that a forward of the unit begins inside backward (activation checkpointing)."""
        self._seen.append(RECOMPUTED)

    def leave(self) -> None:
        """Note that backward is past the unit. It may come again, for another forward of the unit."""
        self.is_entered = False

    def end(self) -> None:
        """Note that backward is over: missing gradients will not arrive."""
        self.number += 1
        self.is_entered = self.is_recorded = False
        self.expected.when_complete = None
        self._num_completed = 0
        came_twice = [gradients.end_backward() for gradients in self._gradients]
        if self._seen:  # else backward did not reach the unit, and teaches nothing
            self._is_gone_through_once = len(set(self._seen)) == len(self._seen) and True not in came_twice
            self._seen.clear()
        for weights in self._weights:
            weights.end_backward()

    def complete(self, group: int) -> None:
        """Note that every trainable parameter of `group` has its gradient."""
        self._seen.append(group)
        self._num_completed += 1
        is_last = self._num_completed >= self.expected.num_groups
        # Backward may go through the unit again, for another forward, and then counts from zero.
        if is_last:
            self._num_completed = 0
        tell = self.expected.when_complete
        if tell is not None and (self.expected.reduces_when_complete or not is_last):
            completed = None if is_last else group
            tell(completed, self._is_done(completed))

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for a reduction, or for the second half of one."""
        for gradients in self._gradients:
            gradients.drop_unreduced()

    # Questions

    @property
    def has_unreduced(self) -> bool:
        return any(gradients.partial is not None or gradients.has_any for gradients in self._gradients)

    def awaits_reduction(self, policy: UnitPolicy, brings_gradients: Callable[[], bool]) -> bool:
        """Returns whether this rank takes part in a reduction of the unit now.

        It does if gradients wait for the reduction; sums over the shard axis may wait for a later one. It also does if
        other ranks may have gradients that this rank lacks, because they reduce the unit now
        (test_a_rank_that_uses_none_of_a_unit_reduces_it_in_its_turn): backward was in the unit, the reduction allows
        for ranks without gradients, and `brings_gradients()` says that this is a backward for parameters.
        """
        was_reduced = True
        for gradients in self._gradients:
            if gradients.has_any:
                return True
            if gradients.partial is not None and policy.all_reduce_gradients:
                # In the order of ranks `torch.autograd.grad` within the last batch of several must not end their sum.
                is_counted = gradients.group.mesh.in_order is not None and policy.accumulation is not None
                if not is_counted or brings_gradients():
                    return True
            was_reduced = was_reduced and gradients.stage is GradientStage.TAKEN
        if was_reduced or not self.is_entered or not policy.reduce_gradients:
            return False
        return any(gradients.may_lack(policy) for gradients in self._gradients) and brings_gradients()

    def lacking(self, present: int) -> list[str]:
        """Returns the names of the parameters of `unflagged` groups without gradients.

        `present` is a bit mask of the groups that have gradients. The last group has the lowest bit.
        """
        absent = [at for at in range(len(self.unflagged)) if not present >> (len(self.unflagged) - 1 - at) & 1]
        return [parameter.name for at in absent for parameter in self.unflagged[at].group.parameters]

    def lack_nothing(self, present: int) -> None:
        """Fill with zeros the gradients of the `unflagged` groups in `present`, the bit mask of another rank."""
        for at, gradients in enumerate(reversed(self.unflagged)):
            if present >> at & 1:
                gradients.have_zeros()

    @property
    def has_received(self) -> bool:
        return any(gradients.has_received for gradients in self._gradients)

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward is still to bring gradients for the unit."""
        return any(weights.awaits_gradients for weights in self._weights)

    def _is_done(self, group: int | None) -> bool:
        """Returns whether nothing in this backward reads the parameters of `group`, or of the unit (None), again.

        All gradients of these parameters have arrived, so autograd is past every use that leads to one. Other uses may
        follow: those of a frozen parameter, on the way to the inputs, or of a view without gradient (`w.detach()`).

        Returns False until one backward has shown that no gradient arrives twice: autograd makes two full gradients of
        a tensor that is used in two reentrant checkpoints, and reads the tensor again in between. Returns False for a
        group alone if a checkpoint may yet run a part of forward again, for gradients of other groups.
        """
        if not self._is_gone_through_once or (group is not None and self.is_under_other_hooks):
            return False
        for chosen in range(len(self._weights)) if group is None else (group,):
            if not (self._gradients[chosen].expects_all and self._weights[chosen].is_unread):
                return False
        return True


def if_alive(owner: weakref.ref[T], act: Callable[[T], None]) -> None:
    """Call `act(owner)`, if the owner still exists. A strong reference from a group to its unit would be a circle."""
    alive = owner()
    if alive is not None:
        act(alive)
