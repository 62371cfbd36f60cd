"""`refresh`: what has changed in a model since it was sharded is taken into its units. For both front ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from sherd.api.module import require_module
from sherd.api.wrapper_state import find_state
from sherd.engine import Refreshed, Unit, adopt_changes
from sherd.errors import ModuleError
from sherd.requirements import require_bool, require_type

__all__ = ["Refreshed", "refresh"]


def refresh(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    sync_module_states: bool = False,
) -> Refreshed:
    """Take what has changed in a sharded `model` into its units. All ranks must call it, between two steps.

    New parameters are sharded into the nearest unit around them, as those were that it had: mesh, placement, precision,
    offload. Parameters that are gone are forgotten, places that were tied are tied, and what was frozen or thawed is
    grouped anew. Shards that stay are the same Parameters with the same values, so optimizers keep them. The order in
    which units run is learnt anew in the next step.

        model = get_peft_model(model, config)
        print(sherd.refresh(model, optimizer))

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper. A model that it is
            a part of is refreshed as a whole.
        optimizer: an optimizer, or several; the first of them gets the new trainable parameters as a group with its
            defaults, and all lose those that are gone, with their state. Other optimizers are told at their next step,
            by a warning.
        sync_module_states: take rank 0's values of new parameters; else each rank takes its part of its own.

    Returns:
        What was done, by names: `adopted`, `dropped`, `retied`, `thawed`, `frozen`. Printed, it is a sentence.

    Raises:
        ModuleError: nothing below `model` is sharded; or what is new is on the meta device and the unit is not, or the
            other way round.
        RanksDifferError: the ranks have changed the model in different ways. Nothing was done then.
        StateError: in the middle of a forward or backward, with gradients that wait for a reduction, or inside
            `sherd.unsharded`.
        UnsupportedError: parameters of a unit with a flat parameter, or with a custom collective, come, go or are tied.
        PlacementError, OwnershipError: as when the unit was made.
    """
    require_module("refresh expects a module", model)
    require_bool("refresh(sync_module_states={})", sync_module_states)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for each in optimizers:
        require_type("refresh(optimizer=...): expected an optimizer, or several", each, Optimizer)
    if not Unit.below(model):
        raise ModuleError(f"refresh: nothing below {type(model).__name__} is sharded; call fully_shard first")
    return adopt_changes(model, optimizers, sync_module_states, _has_flat_parameter)


def _has_flat_parameter(unit: Unit) -> bool:
    states = [state for module in unit.modules if (state := find_state(module)) is not None]
    return any(not state.choices.use_orig_params for state in states)
