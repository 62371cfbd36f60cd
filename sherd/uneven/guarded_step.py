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
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sherd.api.module import optimizers_in, require_module
from sherd.comm.failures import own_rank
from sherd.engine import Runtime, Unit, watcher
from sherd.errors import CommError, GradientError, PolicyError, StateError, UnsupportedError
from sherd.requirements import require_int
from sherd.tensor.state_kind import Stateful
from sherd.uneven.attempt import Attempt, Failure, StepAborted
from sherd.uneven.coordinator import Coordinator
from sherd.uneven.joining import coordinated
from sherd.uneven.snapshot import Snapshot

_log = logging.getLogger("sherd")

MOST_CHARACTERS = 500
"""The length of an error's text in a reason."""


@dataclass
class _Skips:
    """The skipped steps of one model: all, and those since the last step that was not skipped."""

    total: int = 0
    in_a_row: int = 0
    is_in_step: bool = False

    def enter(self, model_class: str) -> None:
        """Begin a step. Raises `StateError` inside another step."""
        if self.is_in_step:
            raise StateError(
                f"sherd.step within sherd.step of the same model, {model_class}; leave the outer one first"
            )
        self.is_in_step = True

    def leave(self) -> None:
        self.is_in_step = False

    def count(self, is_skipped: bool) -> None:
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0


_skips: weakref.WeakKeyDictionary[nn.Module, _Skips] = weakref.WeakKeyDictionary()


class GuardedStep:
    """One step inside `sherd.step`. Its attributes are the same on all ranks.

    Attributes:
        skipped: whether the step was skipped; False until the context ends.
        reason: why the step was skipped, in words; else None.
        rank: the global rank that had the reason, the lowest of several; None if the step was not skipped.
        num_skipped: the number of skipped steps of this model, this step included.
        num_skipped_in_a_row: the number of skipped steps since the last step that was not skipped.
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
        """The number of skipped steps of this model since the last step that was not skipped."""
        return self._skips.in_a_row

    def agree(self) -> None:
        """Wait until all ranks are here, or leave the body if a rank has failed.

        Call it after the last backward and before a collective of your own or of torch, such as clipping or a gradient
        scaler: a rank that has failed does not take part in the collective, and the other ranks would wait for it.

        Raises:
            StateError: outside the context.
            CommError: a rank has died, or does not come before the timeout.
        """
        if not self._skips.is_in_step:
            raise StateError("agree() outside of its sherd.step; call it in the body, between backward and clipping")
        if self._coordinator is not None:
            self._coordinator.done(with_all=False)

    def __enter__(self) -> GuardedStep:
        for unit in self._units:
            runtime = Runtime.over(unit)
            if unit.backward.has_unreduced or not (runtime is None or runtime.is_idle):
                raise StateError(
                    f"sherd.step while a forward or backward of unit {unit.name} is under way, or its gradients wait "
                    "for their reduction; begin it before the first forward of a step, around all of its micro-batches"
                )
        for optimizer in self._optimizers:
            watcher.adopt(optimizer)
        shards = [shard for unit in self._units for shard in unit.shards.optimizer_params]
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
            self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        try:
            failure = self._failure(error, where)
        finally:
            self._skips.leave()
            for hook in self._hooks:
                hook.remove()
            if self._coordinator is not None:
                self._coordinator.end_attempt()
        if failure is None:
            if error is None:
                self._skips.count(is_skipped=False)
            return False
        error = None if isinstance(error, StepAborted) else error
        if failure.obstacle is None:
            self._skip(failure, error is not None)
            return True
        if error is not None:
            return False
        text = f"rank {failure.rank} could not finish a step: {failure.reason}. It is not skipped: {failure.obstacle}"
        raise (GradientError if failure.rank == own_rank() else CommError)(text) from None

    def _failure(self, error: BaseException | None, where: TracebackType | None) -> Failure | None:
        """Returns why all ranks give the step up, or None if they do not."""
        # A rank that is interrupted, or has lost the other ranks, leaves by itself.
        if isinstance(error, CommError) or not isinstance(error, Exception | StepAborted | None):
            return None
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(where)  # The frames hold forward's tensors, and the vote needs memory.
        try:
            if error is not None:
                self._attempt.abandon()
            if self._coordinator is not None and error is None:
                self._coordinator.done()  # raises `StepAborted` if another rank has failed
            elif self._coordinator is None and isinstance(error, StepAborted):
                raise error
            elif error is not None:
                reason = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
                if self._coordinator is None:
                    self._fail_alone(reason)
                else:
                    self._coordinator.fail(reason)
        except StepAborted as given_up:
            failure = given_up.failure
        else:
            return None
        self._attempt.abandon()
        if failure.changed is None:
            self._attempt.undo()
        return failure

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # Without a coordinator, on one rank, the hook does what the coordinator does on several.
        if (reason := self._attempt.refuses(optimizer)) is not None:
            self._fail_alone(reason)
        self._attempt.steps()

    def _fail_alone(self, reason: str) -> None:
        self._attempt.fail(reason)
        raise StepAborted(Failure.of([own_rank()], [self._attempt.report()]))

    def _skip(self, failure: Failure, has_raised: bool) -> None:
        self._skips.count(is_skipped=True)
        self.skipped, self.reason, self.rank = True, failure.reason, failure.rank
        first = int(self._units[0].mesh.mesh.mesh.flatten()[0])
        # A log record, not a warning: a filter that turns warnings into errors would make one rank alone raise.
        _log.log(
            logging.WARNING if has_raised or own_rank() in (first, failure.rank) else logging.INFO,
            "all ranks have skipped a step, since rank %d could not finish it: %s. %d steps were skipped so far, "
            "%d in a row",
            failure.rank,
            failure.reason,
            self.num_skipped,
            self.num_skipped_in_a_row,
        )
        if self._on_skip is not None:
            self._on_skip(self)


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
    when an optimizer is about to step, all ranks leave the body and restore the state of its beginning: buffers,
    earlier gradients, the settings of the optimizers' groups, random states (torch's on CPU and on the model's device,
    and Python's), and the state of the objects in `also`. Parameters and optimizer state have not changed, as no
    optimizer steps on any rank before all ranks are about to step. The error is not raised; a record of the logger
    "sherd" names rank and cause, as a warning on that rank and on the model's first rank. The body does not run again:
    the loop goes on with the next batch.

    Args:
        model: a wrapper, or a module on which `fully_shard` was called, or that holds all such models of the body. All
            units have `CommPolicy(divergence="join")`.
        optimizer: the optimizers that step inside. All ranks must pass the same optimizers, in one order.
        nonfinite: "skip" the step if a gradient that an optimizer is about to use has an inf or a nan, after reduction
            and clipping. The host waits for the gradients once. A step for which a gradient scaler skips the optimizer
            does not count as skipped. "ignore": do not look.
        undo_optimizer: copy parameters and optimizer state before an optimizer steps, so that a failure in or after
            `optimizer.step()` is undone too. Otherwise all ranks raise after such a failure.
        max_skips: after so many skipped steps in a row the next failure raises: its own error on the rank that failed,
            and a `CommError` with that rank and the text on the other ranks.
        also: gradient scalers, schedules, loaders: other objects with a state dict that are stepped inside.
        on_skip: called on all ranks with the `GuardedStep` when the step was skipped.

    Returns:
        The context, a `GuardedStep`, with `skipped`, `reason`, `rank`, `num_skipped` and `num_skipped_in_a_row`.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: a unit has another `divergence`; or `nonfinite` or `max_skips` mean nothing.
        UnsupportedError: the models below `model` are sharded over different ranks.
        StateError: on entering, inside another step, or in the middle of a forward, a backward or an accumulation.
        CommError: on leaving: a rank has died, or does not come before the timeout; or another rank has failed and the
            step is not skipped, after `max_skips` or after an optimizer has stepped. A `GradientError` on the rank
            whose gradients were not finite.
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
