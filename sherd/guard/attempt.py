"""The attempt at a step that all ranks make or skip together: what one rank knows of it.

event on one rank           what its vote says    what all ranks do
the body has raised         FAIL                  undo, if nobody has an obstacle; else all raise
a gradient is not finite    FAIL, not STEP        likewise, and no optimizer has stepped yet
the body has ended          DONE                  go on, once all ranks have
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from sherd.comm.agreement import in_short
from sherd.engine import ShardedParameter, Unit
from sherd.guard.snapshot import Snapshot
from sherd.tensor.ragged import local_part


class Report(NamedTuple):
    """The words of a rank on an attempt that some rank cannot finish. `reason`: why it cannot itself. `changed`: why it
    cannot undo what it has done. `limit`: why it is not to skip the step. `had_gradients`: some were there before."""

    reason: str | None
    changed: str | None
    limit: str | None
    had_gradients: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt was given up, the same on all ranks: `rank` had `reason`. All is undone, unless it was `changed`
    for good. The step is skipped if there is no `obstacle`."""

    rank: int
    reason: str
    changed: str | None
    obstacle: str | None

    @classmethod
    def of(cls, ranks: Sequence[int], reports: Sequence[Report | None]) -> Failure:
        """Returns what follows from the `reports` of `ranks`; None is from a rank that makes no attempt."""
        inside = [each for each in reports if each is not None]
        changes = [each.changed for each in inside if each.changed is not None]
        if len(inside) < len(reports) and any(each.had_gradients for each in inside):
            changes.append("a rank outside of sherd.step cannot bring back gradients from before it")
        obstacles = [*changes, *(each.limit for each in inside if each.limit is not None)]
        rank, reason = next(
            (rank, each.reason)
            for rank, each in zip(ranks, reports, strict=True)
            if each is not None and each.reason is not None
        )
        return cls(rank, reason, next(iter(changes), None), next(iter(obstacles), None))


class GivenUp(BaseException):
    """Leaves a step that all ranks give up, from wherever this rank is in it. No `except Exception` is to stop it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank} cannot finish this step: {failure.reason}")
        self.failure = failure


class Attempt:
    """One rank's attempt at a step.

    Args:
        units: of the model.
        snapshot: what the step may change.
        checks_gradients: those that are not finite are a reason not to step.
        undoes_optimizers: copy what an optimizer changes, before it does.
        limit: why the step must not be skipped, whatever happens in it.
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
        # A scaler has these looked at by the optimizer itself, and lets it skip.
        is_scaled = getattr(optimizer, "found_inf", None) is not None
        wrong = _not_finite_in(optimizer) if self._checks_gradients and not is_scaled else []
        if not wrong and self._undoes_optimizers:
            self._snapshot.keep_stepped(optimizer)
        return f"gradients that are not finite: {in_short(wrong)}" if wrong else None

    def steps(self, for_good: bool = False) -> None:
        """An optimizer steps now, on all ranks; `for_good`: some parameters change of which there is no copy."""
        self._has_stepped = True
        self._changed = self._changed or for_good or not self._undoes_optimizers

    def fail(self, reason: str) -> None:
        """Note why this rank cannot finish."""
        self._reason = reason

    def report(self) -> Report:
        """Returns what the other ranks have to know, now that one cannot finish."""
        changed = (
            "an optimizer has stepped on some ranks, and the parameters are not as before; go on from a checkpoint. "
            "sherd.step(..., undo_optimizer=True) keeps copies, unless an optimizer steps inside backward, or a rank "
            "has no batch left"
        )
        return Report(self._reason, changed if self._changed else None, self._limit, self._snapshot.has_gradients)

    def abandon(self) -> None:
        """Have shards, and nothing in flight, wherever the model was."""
        conductors = {id(each): each for unit in self._units if (each := unit.sealed_into()) is not None}
        for conductor in conductors.values():
            conductor.reset()

    def undo(self) -> None:
        """Have everything as it was before."""
        self._snapshot.restore()
        if self._has_stepped:
            for unit in self._units:
                unit.shards_written()


def _not_finite_in(optimizer: Optimizer) -> list[str]:
    """Returns the parameters of `optimizer` of whose gradients this rank holds an inf or a nan. The host waits for the
    gradients, once for each device."""
    given = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    held = [(each, part) for each in given if (part := local_part(each.grad.detach())).numel()]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, part in held:
        by_device.setdefault(part.device, []).append(part)
    largest = (torch._foreach_norm(parts, math.inf) for parts in by_device.values())
    if all(bool(torch.stack([each.float() for each in norms]).isfinite().all()) for norms in largest):
        return []
    wrong = [parameter for parameter, part in held if not bool(part.isfinite().all())]
    return [ShardedParameter.name_of(each) for each in wrong]
