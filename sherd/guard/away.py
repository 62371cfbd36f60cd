"""The optimizer steps of ranks that have no batch left: with the others' settings, if nothing else is needed.

Such a rank has the same gradients as the others, its part of them. It cannot know what their loop does with them before
it steps; so the others look whether gradients are still as they were reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd.comm.agreement import in_short
from sherd.engine import ShardedParameter, Unit
from sherd.tensor.ragged import local_part

Settings = list[dict[str, Any]]
"""By group of parameters: learning rate and whatever else it is stepped with."""

PARAMETERS = ("params", "param_names")


def settings_of(optimizer: Optimizer) -> Settings:
    """Returns what each group is stepped with: all but the parameters."""
    return [{key: value for key, value in group.items() if key not in PARAMETERS} for group in optimizer.param_groups]


def take_settings(optimizer: Optimizer, settings: Settings) -> None:
    """Step with these from now on."""
    for group, chosen in zip(optimizer.param_groups, settings, strict=True):
        group.update(chosen)


class ReducedGradients:
    """Copies of the gradients of `units` as the last backward has left them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [weakref.ref(unit) for unit in units]  # they hold the mesh, which holds what holds this
        self._kept = {id(parameter): gradient.clone() for parameter, gradient in _gradients_of(units)}

    def changed(self) -> list[str]:
        """Returns the parameters whose gradients are others now. The host waits for them."""
        gradients = _gradients_of(self._alive())
        changed = [parameter for parameter, gradient in gradients if not self._is_kept(parameter, gradient)]
        return list(map(ShardedParameter.name_of, changed))

    def _alive(self) -> Iterator[Unit]:
        return (unit for ref in self._units if (unit := ref()) is not None)

    def _is_kept(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        kept = self._kept.get(id(parameter))
        return kept is not None and torch.equal(gradient.nan_to_num(), kept.nan_to_num())


def refusal(changed: Sequence[str]) -> str:
    """Returns the text of the error for gradients that were `changed` where ranks without a batch cannot."""
    return (
        f"rank {dist.get_rank()} has changed its gradients between backward and the optimizer's step (clipped or "
        f"scaled them: {in_short(changed)}), and ranks that have no batch left would step without that; have the loop "
        "ask for its batches: with sherd.join(model) as ranks: for batch in ranks.batches(loader)"
    )


def _gradients_of(units: Iterable[Unit]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for unit in units:
        for parameter in unit.shards.optimizer_params:
            if parameter.grad is not None:
                yield parameter, local_part(parameter.grad).detach()
