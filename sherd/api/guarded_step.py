"""`step`: an optimizer step that all ranks make, or all skip because one of them cannot."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sherd.api.joining import coordinated, optimizers_in
from sherd.api.module import require_module
from sherd.engine import Unit, watcher
from sherd.errors import CommError, GradientError, PolicyError, StateError, UnsupportedError
from sherd.guard import Attempt, Coordinator, Failure, GivenUp
from sherd.guard.snapshot import Snapshot, Stateful
from sherd.requirements import require_int

_log = logging.getLogger("sherd")

MOST_CHARACTERS = 500
"""Of an error's text, in a reason."""


@dataclass
class _Skips:
    """The skipped steps of one model: all of them, and those since the last one that was made."""

    total: int = 0
    in_a_row: int = 0
    is_in_step: bool = False

    def made(self) -> None:
        """A step was made."""
        self.in_a_row = 0

    def skipped(self) -> None:
        """A step was skipped."""
        self.total += 1
        self.in_a_row += 1

    def enter(self, kind: str) -> None:
        """A step begins. Raises `StateError` inside of another one."""
        if self.is_in_step:
            raise StateError(f"sherd.step within sherd.step of the same model, {kind}; leave the outer one first")
        self.is_in_step = True

    def leave(self) -> None:
        """It has ended."""
        self.is_in_step = False


_skips: weakref.WeakKeyDictionary[nn.Module, _Skips] = weakref.WeakKeyDictionary()


class GuardedStep:
    """One step inside `sherd.step`. Its attributes are the same on all ranks.

    Attributes:
        skipped: whether it was skipped; False until the context ends.
        reason: why, in words; None if it was not.
        rank: the rank that had the reason, a global one; None if it was not skipped. The lowest of several.
        num_skipped: the number of skipped steps of this model, this one included.
        num_skipped_in_a_row: likewise, since the last one that was made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        others: Sequence[Stateful],
        units: Sequence[Unit],
        coordinator: Coordinator | None,
        checks_gradients: bool,
        undoes_optimizers: bool,
        max_skips: int,
        on_skip: Callable[[GuardedStep], object] | None,
    ) -> None:
        self._model, self._optimizers, self._others = model, optimizers, others
        self._units, self._coordinator = units, coordinator
        self._checks_gradients, self._undoes_optimizers = checks_gradients, undoes_optimizers
        self._max_skips, self._on_skip = max_skips, on_skip
        self._skips = _skips.setdefault(model, _Skips())
        self._hooks: list[RemovableHandle] = []
        self.skipped = False
        self.reason: str | None = None
        self.rank: int | None = None

    @property
    def num_skipped(self) -> int:
        """The number of skipped steps of this model."""
        return self._skips.total

    @property
    def num_skipped_in_a_row(self) -> int:
        """The number of skipped steps of this model since the last one that was made."""
        return self._skips.in_a_row

    def agree(self) -> None:
        """Go on when all ranks have come here, or leave the body if one has failed.

        Call it behind the last backward and before a collective of your own, or of torch's, as clipping is, or what a
        gradient scaler does: a rank that has failed takes no part in these, and the others would wait for it.

        Raises:
            StateError: outside of the context.
            CommError: a rank has died, or does not come before the timeout.
        """
        if not self._skips.is_in_step:
            raise StateError("agree() outside of its sherd.step; call it in the body, between backward and clipping")
        if self._coordinator is not None:
            self._coordinator.done(with_all=False)

    def __enter__(self) -> GuardedStep:
        self._require_idle()
        for each in self._optimizers:
            watcher.adopt(each)
        shards = [each for unit in self._units for each in unit.shards.optimizer_params]
        device = self._units[0].mesh.device
        snapshot = Snapshot(self._model, shards, self._optimizers, self._others, device)
        in_a_row, limit = self._skips.in_a_row, None
        if in_a_row >= self._max_skips:
            limit = f"{in_a_row} steps in a row have been skipped, as many as max_skips allows"
        attempt = Attempt(self._units, snapshot, self._checks_gradients, self._undoes_optimizers, limit)
        if self._coordinator is not None:
            self._coordinator.begin_attempt(attempt)
        self._skips.enter(type(self._model).__name__)
        self._attempt = attempt
        if self._coordinator is None:
            self._hooks = [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        try:
            failure = self._failure(error, where)
        finally:
            self._leave()
        if failure is None:
            if error is None:
                self._skips.made()
            return False
        error = None if isinstance(error, GivenUp) else error
        if failure.obstacle is None:
            self._skip(failure, error is not None)
            return True
        if error is not None:
            return False
        text = f"rank {failure.rank} could not finish a step: {failure.reason}. It is not skipped: {failure.obstacle}"
        raise (GradientError if self._failed_here(failure) else CommError)(text) from None

    def _require_idle(self) -> None:
        for unit in self._units:
            conductor = unit.sealed_into()
            if unit.backward.has_unreduced or not (conductor is None or conductor.is_idle):
                raise StateError(
                    f"sherd.step while a forward or backward of unit {unit.name} is under way, or its gradients wait "
                    "for their reduction; begin it before the first forward of a step, around all of its micro-batches"
                )

    def _failure(self, error: BaseException | None, where: TracebackType | None) -> Failure | None:
        """Returns why all ranks give the step up, if they do. A rank that is interrupted, or has lost the others,
        leaves by itself."""
        if isinstance(error, CommError) or not isinstance(error, Exception | GivenUp | None):
            return None
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(where)  # which hold what forward has made, and going along needs memory
        try:
            if error is not None:
                self._attempt.abandon()
            self._vote(error)
        except GivenUp as given_up:
            failure = given_up.failure
        else:
            return None
        self._attempt.abandon()
        if failure.changed is None:
            self._attempt.undo()
        return failure

    def _vote(self, error: BaseException | None) -> None:
        """Say that this rank is done, or why not. Raises `GivenUp` if any rank is not."""
        if self._coordinator is None:
            if isinstance(error, GivenUp):
                raise error
            if error is not None:
                self._fail_alone(_in_words(error))
        elif error is None:
            self._coordinator.done()
        else:
            self._coordinator.fail(_in_words(error))

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """On one rank: `optimizer` is about to step."""
        if (reason := self._attempt.refuses(optimizer)) is not None:
            self._fail_alone(reason)
        self._attempt.steps()

    def _fail_alone(self, reason: str) -> None:
        self._attempt.fail(reason)
        raise GivenUp(Failure.of([_own_rank()], [self._attempt.report()]))

    def _leave(self) -> None:
        self._skips.leave()
        for each in self._hooks:
            each.remove()
        if self._coordinator is not None:
            self._coordinator.end_attempt()

    def _failed_here(self, failure: Failure) -> bool:
        return failure.rank == _own_rank()

    def _skip(self, failure: Failure, has_raised: bool) -> None:
        self._skips.skipped()
        self.skipped, self.reason, self.rank = True, failure.reason, failure.rank
        first = int(self._units[0].mesh.mesh.mesh.flatten()[0])
        # Not a warning: a filter that makes an error of it would have one rank alone raise.
        _log.log(
            logging.WARNING if has_raised or _own_rank() in (first, failure.rank) else logging.INFO,
            "all ranks have skipped a step, since rank %d could not finish it: %s. %d steps were skipped so far, "
            "%d in a row",
            failure.rank,
            failure.reason,
            self.num_skipped,
            self.num_skipped_in_a_row,
        )
        if self._on_skip is not None:
            self._on_skip(self)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]


def step(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    nonfinite: Literal["skip", "ignore"] = "skip",
    undo_optimizer: bool = False,
    max_skips: int = 3,
    also: Sequence[Stateful] = (),
    on_skip: Callable[[GuardedStep], object] | None = None,
) -> GuardedStep:
    """Make an optimizer step on all ranks, or on none: a context around forward, backward and `optimizer.step()`.

        for batch in loader:
            with sherd.step(model, optimizer) as attempt:
                loss_of(model, batch).backward()
                optimizer.step()
            optimizer.zero_grad()
            if not attempt.skipped:
                schedule.step()

    If the body raises on one rank (an `Exception`, out of memory too), or a rank finds a gradient that is not finite
    when an optimizer is about to step, all ranks leave the body and have everything as it was when they entered it:
    buffers, gradients that were there, the settings of the optimizers' groups, random states (torch's on CPU and on the
    model's device, and Python's), and the state of what is in `also`. Parameters and optimizer state have not changed
    then, as no optimizer steps on any rank before all ranks are about to. The error is not raised; a line of the logger
    "sherd" names rank and cause, a warning on that rank and on the model's first one. The body is not run again: the
    loop goes on with the next batch.

    Args:
        model: a model on all of whose units `CommPolicy(divergence="join")` was given: a wrapper, or one on which
            `fully_shard` was called, or a module that holds all such models which the body runs.
        optimizer: the optimizers that step inside. All ranks must pass the same, in one order.
        nonfinite: "skip" the step if a gradient that an optimizer is about to use has an inf or a nan, after reduction
            and clipping. The host waits for the gradients once. Those that a gradient scaler has found, and skips the
            optimizer for, count as a step that was made. "ignore": do not look.
        undo_optimizer: copy parameters and optimizer state before an optimizer steps, so that a failure in or after
            `optimizer.step()` is undone, too. Without it, all ranks raise then.
        max_skips: after so many skipped steps in a row the next failure raises: the rank's own error on the rank that
            had it, a `CommError` with its rank and text on the others.
        also: gradient scalers, schedules, loaders: whatever else has a state dict, and is stepped inside.
        on_skip: called on all ranks with the `GuardedStep` when the step was skipped.

    Returns:
        The context, a `GuardedStep`; what happened is in its `skipped`, `reason`, `rank`, `num_skipped` and
        `num_skipped_in_a_row`.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: its units have another `divergence`; or `nonfinite` or `max_skips` mean nothing.
        UnsupportedError: the models below `model` are sharded over different ranks.
        StateError: on entering, inside another step, or in the middle of a forward, a backward or an accumulation.
        CommError: on leaving: a rank has died, or does not come before the timeout; or another rank has failed and the
            step is not skipped: after `max_skips`, or after an optimizer has stepped. It is a `GradientError` on the
            rank whose gradients were not finite.
    """
    require_module("step expects a module", model)
    optimizers = optimizers_in("step", optimizer)
    if nonfinite not in ("skip", "ignore"):
        raise PolicyError(f"step(nonfinite={nonfinite!r}): expected 'skip' or 'ignore'")
    require_int("step(max_skips={})", max_skips, 0)
    units, coordinators = coordinated("step", model)
    if len(coordinators) > 1:
        raise UnsupportedError(
            f"step: the models below {type(model).__name__} are sharded over different ranks, which do not wait for "
            "one another; give each its own sherd.step"
        )
    coordinator = coordinators[0] if coordinators else None
    if coordinator is not None:
        for each in optimizers:
            coordinator.know(each)
    return GuardedStep(
        model, optimizers, also, units, coordinator, nonfinite == "skip", undo_optimizer, max_skips, on_skip
    )
