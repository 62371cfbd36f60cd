"""`join`: ranks with different numbers of batches train together, for both front ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from sherd.api.module import optimizers_in, require_module, sharded_units
from sherd.engine import Runtime, Unit
from sherd.errors import PolicyError
from sherd.uneven.coordinator import Coordinator
from sherd.wrap import outermost

Batch = TypeVar("Batch")


class Joined:
    """The ranks that train together inside `sherd.join`."""

    def __init__(self, units: Sequence[Unit], coordinators: Sequence[Coordinator]) -> None:
        self._units, self._coordinators = units, coordinators

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`, and the last batch again as long as any rank has a batch left.

        The gradients of a repeated batch are dropped before the reduction, so that they count as zeros, and everything
        else in the loop (gradient scaling, clipping, learning rates, the loop's own collectives) runs on all ranks
        alike. Forward updates buffers, as the running mean of batch norm, with the repeated batch. A rank without any
        batch leaves the loop at once, and takes part from the end of the context.
        """
        yielded: list[Batch] = []
        source = iter(batches)
        try:
            while True:
                for batch in source:
                    yielded = [batch]
                    break
                else:
                    self._contribute(False)
                    if not self._any_has(False) or not yielded:
                        return
                    yield yielded[0]
                    continue
                self._any_has(True)
                yield batch
        finally:
            self._contribute(True)

    def _any_has(self, has_batch: bool) -> bool:
        """Returns whether any rank has a batch left; `has_batch` says so of this rank."""
        answers = [coordinator.agree_on_batch(has_batch) for coordinator in self._coordinators]
        return any(answers)

    def _contribute(self, contributes: bool) -> None:
        for unit in self._units:
            if unit.policy.contributes is not contributes:
                unit.change(contributes=contributes)


@contextmanager
def join(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = ()) -> Iterator[Joined]:
    """Let ranks have different numbers of batches.

    A rank that leaves the context takes part in the other ranks' steps, with zero gradients, until all ranks have left.

        with sherd.join(model, optimizer):
            for batch in loader:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    Gradients are divided by the number of all ranks, as in every step. A rank that has left steps its part of the
    parameters whenever the other ranks step, with their learning rates, and then drops its gradients. It does not run
    the rest of the loop, so a loop that scales or clips gradients takes its batches from `batches`:

        with sherd.join(model) as ranks:
            for batch in ranks.batches(loader):
                ...

    Args:
        model: a wrapper, or a module on which `fully_shard` was called, or that holds such modules. All units have
            `CommPolicy(divergence="join")`.
        optimizer: the optimizers of the loop, for a rank that has no batch at all. All ranks must pass the same
            optimizers, in one order.

    Yields:
        The `Joined` ranks.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: a unit has another `divergence`.
        CommError: a rank has died, or does not come before the timeout; or ranks step different optimizers.
    """
    require_module("join expects a module", model)
    optimizers = optimizers_in("join", optimizer)
    units, coordinators = coordinated("join", model)
    for coordinator in coordinators:
        for each in optimizers:
            coordinator.know(each)
    yield Joined(units, coordinators)
    for coordinator in coordinators:
        coordinator.leave()


def coordinated(caller: str, model: nn.Module) -> tuple[list[Unit], list[Coordinator]]:
    """Returns the units at and below `model`, and their coordinators: none on one rank."""
    units = sharded_units(caller, model)
    for unit in units:
        if unit.mesh.comm.divergence != "join":
            raise PolicyError(
                f"{caller}: unit {unit.name} has CommPolicy(divergence={unit.mesh.comm.divergence!r}); give all units "
                'of the model comm_policy=CommPolicy(divergence="join")'
            )
    monitors = {each for at, root in outermost(model, Unit.of) for each in Runtime.of(root, at).monitors}
    return units, [each for each in monitors if isinstance(each, Coordinator)]
