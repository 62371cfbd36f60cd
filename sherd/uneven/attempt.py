"""The attempt at a step that all ranks make or skip together: what one rank knows of it.

event on one rank           its vote              what all ranks do
the body raises             FAIL                  undo, unless a rank has an obstacle; then all raise
a gradient is not finite    FAIL, not STEP        as above, and no optimizer has stepped yet
the body ends               DONE                  go on, once all ranks have voted so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.optim import Optimizer

from sherd.engine import Runtime, Unit
from sherd.errors import in_short
from sherd.guard.deeds import not_finite
from sherd.tensor.ragged import local_part
from sherd.uneven.snapshot import Snapshot


class AttemptReport(NamedTuple):
    """A rank's message to the others about an attempt that some rank cannot finish.

    Attributes:
        reason: why this rank cannot finish it; None if it can.
        changed: why this rank cannot undo what it has done; None if it can.
        limit: why the step must not be skipped; None if it may.
        had_gradients: there were gradients before the attempt.
    """

    reason: str | None
    changed: str | None
    limit: str | None
    had_gradients: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Why all ranks gave an attempt up. It is the same on all ranks.

    Attributes:
        rank: the lowest rank that could not finish.
        reason: why that rank could not finish.
        changed: why the step cannot be rolled back; None if it is.
        obstacle: why the step is not skipped, and all ranks raise; None if it is skipped.
    """

    rank: int
    reason: str
    changed: str | None
    obstacle: str | None

    @classmethod
    def of(cls, ranks: Sequence[int], reports: Sequence[AttemptReport | None]) -> Failure:
        """Returns the failure that follows from the `reports` of `ranks`; a rank without an attempt reports None."""
        inside = [report for report in reports if report is not None]
        changes = [report.changed for report in inside if report.changed is not None]
        if len(inside) < len(reports) and any(report.had_gradients for report in inside):
            changes.append("a rank outside of sherd.step cannot bring back gradients from before it")
        obstacles = [*changes, *(report.limit for report in inside if report.limit is not None)]
        rank, reason = next(
            (rank, report.reason)
            for rank, report in zip(ranks, reports, strict=True)
            if report is not None and report.reason is not None
        )
        return cls(rank, reason, next(iter(changes), None), next(iter(obstacles), None))


class StepAborted(BaseException):
    """Raised on every rank when a step is aborted. A BaseException, so that `except Exception` does not catch it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank} cannot finish this step: {failure.reason}")
        self.failure = failure


class Attempt:
    """One rank's attempt at a step.

    Args:
        units: the units of the model.
        snapshot: everything that the step may change.
        checks_gradients: refuse to step with gradients that are not finite.
        undoes_optimizers: copy what an optimizer changes before it steps.
        limit: why the step must not be skipped, whatever happens in it; None if it may.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        snapshot: Snapshot,
        checks_gradients: bool,
        undoes_optimizers: bool,
        limit: str | None,
    ) -> None:
        self._units, self._snapshot = units, snapshot
        self._checks_gradients, self._undoes_optimizers = checks_gradients, undoes_optimizers
        self._limit = limit
        self._reason: str | None = None
        self._has_stepped, self._changed = False, False

    def refuses(self, optimizer: Optimizer) -> str | None:
        """Returns why `optimizer`, which is about to step, must not; None if it may."""
        # A gradient scaler checks its gradients itself, and lets the optimizer skip the step.
        is_scaled = getattr(optimizer, "found_inf", None) is not None
        with_gradient = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        looks = self._checks_gradients and not is_scaled
        wrong = not_finite([(each, local_part(each.grad.detach())) for each in with_gradient]) if looks else []
        if not wrong and self._undoes_optimizers:
            self._snapshot.keep_stepped(optimizer)
        return f"gradients that are not finite: {in_short(wrong)}" if wrong else None

    def steps(self, for_good: bool = False) -> None:
        """Note that an optimizer steps now, on all ranks.

        Args:
            for_good: some of the parameters that change have no copy.
        """
        self._has_stepped = True
        self._changed = self._changed or for_good or not self._undoes_optimizers

    def fail(self, reason: str) -> None:
        """Note why this rank cannot finish."""
        self._reason = reason

    def report(self) -> AttemptReport:
        """Returns what the other ranks must know when one rank cannot finish."""
        changed = (
            "an optimizer has stepped on some ranks, and the parameters are not as before; go on from a checkpoint. "
            "sherd.step(..., undo_optimizer=True) keeps copies, unless an optimizer steps inside backward, or a rank "
            "has no batch left"
        )
        return AttemptReport(
            self._reason, changed if self._changed else None, self._limit, self._snapshot.has_gradients
        )

    def abandon(self) -> None:
        """Reshard the model, and leave no collective in flight."""
        runtimes = {id(runtime): runtime for unit in self._units if (runtime := Runtime.over(unit)) is not None}
        for runtime in runtimes.values():
            runtime.reset()

    def undo(self) -> None:
        """Restore everything to its state before the attempt."""
        self._snapshot.restore()
        if self._has_stepped:
            for unit in self._units:
                unit.shards_written()
