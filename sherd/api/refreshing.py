"""`refresh`: takes the changes of a sharded model into its units, for both front ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from sherd.api.module import optimizers_in, require_module, sharded_units
from sherd.engine import Refreshed, adopt_changes
from sherd.requirements import require_bool

__all__ = ["Refreshed", "refresh"]


def refresh(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    sync_module_states: bool = False,
) -> Refreshed:
    """Take the changes of a sharded `model` into its units. All ranks must call `refresh`, between two steps.

    New parameters are sharded into the nearest unit around them, with the mesh, placement, precision and offload of
    that unit. Removed parameters are dropped, newly tied parameters are tied, and parameters that were frozen or thawed
    are regrouped. Shards that stay are the same Parameters with the same values, so optimizers keep them. The order
    in which units run is learnt again in the next step.

        model = get_peft_model(model, config)
        print(sherd.refresh(model, optimizer))

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper. If `model` is a
            part of a larger model, the larger model is refreshed.
        optimizer: an optimizer, or several. The first gets a group of the new trainable parameters, with its defaults;
            all lose the removed parameters, with their state. Other optimizers warn at their next step.
        sync_module_states: take rank 0's values of new parameters; otherwise each rank takes its part of its own.

    Returns:
        The names of changed parameters: `adopted`, `dropped`, `retied`, `thawed`, `frozen`. Printed, a sentence.

    Raises:
        ModuleError: nothing below `model` is sharded; or new parameters are on the meta device and the unit is not, or
            the other way round.
        RanksDifferError: the ranks have changed the model in different ways. Nothing is changed.
        StateError: in the middle of a forward or backward, with gradients that wait for a reduction, or inside
            `sherd.unsharded`.
        UnsupportedError: parameters of a unit with a flat parameter, or with a custom collective, are added, removed or
            tied.
        PlacementError, OwnershipError: as when the unit was made.
    """
    require_module("refresh expects a module", model)
    require_bool("refresh(sync_module_states={})", sync_module_states)
    optimizers = optimizers_in("refresh", optimizer)
    sharded_units("refresh", model)
    return adopt_changes(model, optimizers, sync_module_states)
