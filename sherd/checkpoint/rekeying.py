"""How is a state keyed by the names of parameters keyed by their numbers in an optimizer, and the other way round?"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sherd.checkpoint.catalog import Catalog
from sherd.engine.state.parameter import plain_name
from sherd.errors import OptimStateError


class OptimStateKeyType(Enum):
    """What an optimizer's state is keyed by."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """A full state keyed by names or by numbers, as asked for: itself, if it is so already or has no state. No tensor
    is copied.

    Args:
        optim_state_dict: of an optimizer, keyed by names or by numbers.
        optim_state_key_type: what it is to be keyed by.
        model: the model the optimizer was built from, as it was before it was wrapped, or with its own parameters.
        optim_input: what the optimizer was built from, if that is not all parameters in order.
        optim: the optimizer itself, instead.

    Raises:
        OptimStateError: names and numbers mixed, keys that the model does not have, a flat parameter, or another type.
    """
    if optim_state_key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise OptimStateError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {optim_state_key_type!r}"
        )
    keys = optim_state_dict["state"].keys()
    wanted: type = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    if all(isinstance(key, wanted) for key in keys):
        return optim_state_dict
    if not all(isinstance(key, int) for key in keys) and not all(isinstance(key, str) for key in keys):
        raise OptimStateError(
            f"Invalid parameter keys: {list(keys)}; a state is keyed by names or by numbers, not by both"
        )
    names = _names(model, optim_input, optim)
    to: dict[Any, Any] = dict(enumerate(names))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        to = {name: number for number, name in to.items()}
    return {
        "state": {_found(to, key): state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(_found(to, key) for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }


def _names(model: nn.Module, optim_input: Any, optim: Optimizer | None) -> list[str]:
    """By the numbers that an optimizer gives its parameters."""
    catalog = Catalog(model)
    groups = catalog.groups_of(optim) if optim is not None else catalog.groups_of_input(optim_input)[0]
    owned = [each for group in groups for each in group]
    flat = next((each for each in owned if len(each.members) > 1), None)
    if flat is not None:
        raise OptimStateError(
            f"Each parameter should only map to one parameter name but got {len(flat.members)}: {flat.names}; pass the "
            "model as it was before it was wrapped, or wrap with use_orig_params=True"
        )
    return [each.names[0] for each in owned]


def _found(to: dict[Any, Any], key: Any) -> Any:
    plain = plain_name(key) if isinstance(key, str) else key
    if plain not in to:
        raise OptimStateError(
            f"the state has {key!r}, and the model's optimizer only {list(to)[:5]} and so on; pass the model, and the "
            "optimizer input, that the state was made with"
        )
    return to[plain]
