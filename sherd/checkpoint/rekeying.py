"""`rekey_optim_state_dict`: from parameter names to the optimizer's numbers as the keys of a state, and back."""

from __future__ import annotations

from enum import Enum, auto

from torch import nn
from torch.optim import Optimizer

from sherd.checkpoint.catalog import Catalog, StateDict, plain_key
from sherd.errors import OptimStateError


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state. Names and members are those of `torch.distributed.fsdp.OptimStateKeyType`."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: object = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Returns a full state keyed as asked for, or `optim_state_dict` itself if it has these keys or no state.

    No tensor is copied.

    Args:
        optim_state_dict: the state of an optimizer, keyed by names or by numbers.
        optim_state_key_type: the keys of the result.
        model: the model that the optimizer was built from, before it was wrapped, or with its own parameters.
        optim_input: the parameters or groups that the optimizer was built from. None: all parameters in order.
        optim: the optimizer, instead of `optim_input`.

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
    new_keys: dict[object, str | int] = dict(enumerate(names))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        new_keys = {name: number for number, name in enumerate(names)}
    return {
        "state": {_new_key(new_keys, key): state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(_new_key(new_keys, key) for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }


def _names(model: nn.Module, optim_input: object, optim: Optimizer | None) -> list[str]:
    """Returns the names of the optimizer's parameters, in the order of the numbers that it gives them."""
    catalog = Catalog(model)
    groups = catalog.groups_of(optim) if optim is not None else catalog.groups_of_input(optim_input)[0]
    entries = [entry for group in groups for entry in group]
    flat = next((entry for entry in entries if len(entry.members) > 1), None)
    if flat is not None:
        raise OptimStateError(
            f"Each parameter should only map to one parameter name but got {len(flat.members)}: {flat.names}; pass the "
            "model as it was before it was wrapped, or wrap with use_orig_params=True"
        )
    return [entry.names[0] for entry in entries]


def _new_key(new_keys: dict[object, str | int], key: object) -> str | int:
    plain = plain_key(key)
    if plain not in new_keys:
        raise OptimStateError(
            f"the state has {key!r}, and the model's optimizer only {list(new_keys)[:5]} and so on; pass the "
            "model, and the optimizer input, that the state was made with"
        )
    return new_keys[plain]
