"""`join`: ranks with different numbers of batches train together, for both front ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from sherd.api.module import require_module
from sherd.engine import Runtime, Unit
from sherd.errors import ModuleError, PolicyError
from sherd.guard import Coordinator
from sherd.requirements import require_type

Batch = TypeVar("Batch")


class Joined:
    """The ranks that train together inside `sherd.join`."""

    def __init__(self, units: Sequence[Unit], coordinators: Sequence[Coordinator]) -> None:
        self._units, self._coordinators = units, coordinators

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`, and the last of them again as long as any rank has one left.

        The gradients of a batch that is yielded again are dropped on their way to the reduction, so it counts as zero,
        and everything else in the loop (gradient scaling, clipping, learning rates, collectives of its own) runs on all
        ranks alike. What forward leaves in buffers, as the running mean of batch norm, is that of the repeated batch. A
        rank that never had a batch leaves the loop at once and takes part from the end of the context.
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

    def _any_has(self, has_one: bool) -> bool:
        """Returns whether any rank has a batch left; this one has, or has not."""
        found = [each.agree_on_batch(has_one) for each in self._coordinators]
        return any(found)

    def _contribute(self, contributes: bool) -> None:
        for unit in self._units:
            if unit.policy.contributes is not contributes:
                unit.change(contributes=contributes)


@contextmanager
def join(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = ()) -> Iterator[Joined]:
    """Let ranks have different numbers of batches: one that leaves the context takes part in the others' steps, with
    zero gradients, until all have left.

        with sherd.join(model, optimizer):
            for batch in loader:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    Gradients are divided by the number of all ranks, as in every step. A rank that has left steps its part of the
    parameters whenever the others step theirs, with their learning rates, and then drops its gradients. It cannot see
    what the loop does with gradients besides, so a loop that scales or clips them asks for its batches here:

        with sherd.join(model) as ranks:
            for batch in ranks.batches(loader):
                ...

    Args:
        model: a model on all of whose units `CommPolicy(divergence="join")` was given; a wrapper, or one on which
            `fully_shard` was called, or that holds such modules.
        optimizer: the optimizers of the loop, which a rank must know that has no batch at all. All ranks must pass the
            same, in one order.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: its units have another `divergence`.
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
    """Returns the units at and below `model`, and those who coordinate them: none on one rank.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: its units have another `divergence` than "join".
    """
    units = Unit.below(model)
    if not units:
        raise ModuleError(f"{caller}: nothing below {type(model).__name__} is sharded; call fully_shard first")
    for unit in units:
        if unit.mesh.comm.divergence != "join":
            raise PolicyError(
                f"{caller}: unit {unit.name} has CommPolicy(divergence={unit.mesh.comm.divergence!r}); give all units "
                'of the model comm_policy=CommPolicy(divergence="join")'
            )
    overseers = {each for root, at in _roots(model) for each in Runtime.of(root, at).overseers}
    return units, [each for each in overseers if isinstance(each, Coordinator)]


def optimizers_in(caller: str, given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers that were `given`, one or several."""
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for each in optimizers:
        require_type(f"{caller}(optimizer=...): expected an optimizer, or several", each, Optimizer)
    return optimizers


def _roots(module: nn.Module) -> Iterator[tuple[Unit, nn.Module]]:
    """Yields the outermost units at and below `module`, each with the module that it was found at."""
    unit = Unit.of(module)
    if unit is not None:
        yield unit, module
    else:
        for child in module.children():
            yield from _roots(child)
