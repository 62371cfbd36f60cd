"""The wrapper's static methods for state dicts of models and optimizers: FSDP1's names and signatures.

`set_state_dict_type` of the wrappers says which form a state has; a model without wrappers has FSDP1's default, the
full state on all ranks in host memory. All ranks must call each of the methods for optimizer state, which are those of
`sherd.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd.checkpoint.catalog import Catalog, plain_key
from sherd.checkpoint.loading import from_rank0, to_load
from sherd.checkpoint.saving import Form, state_by_name
from sherd.errors import OptimStateError, WrapperStateError
from sherd.fsdp1 import advice
from sherd.fsdp1.state_dict_type import (
    CONFIGS,
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDict,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    is_on_rank0_only,
)
from sherd.fsdp1.wrapper_state import WrapperState, find_state
from sherd.requirements import as_own, require_type

# The kind of state dict


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the kind of state dict that the wrappers at and below `module` give. A config of None is the kind's default.

    Returns:
        The settings before; all fields are None if there is no wrapper.

    Raises:
        PolicyTypeError: `state_dict_type` is no `StateDictType`.
        WrapperStateError: a config of another kind, or wrappers with different settings (a RuntimeError and an
            AssertionError).
        PolicyError: a config that asks for two forms.
    """
    advice.of_state_dict_type(for_a_while=False)
    return _set(module, state_dict_type, state_dict_config, optim_state_dict_config)


def _set(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    state_dict_type = as_own(state_dict_type, [StateDictType])
    require_type(f"state_dict_type={state_dict_type!r}: expected a sherd.StateDictType", state_dict_type, StateDictType)
    wanted, optim_wanted = CONFIGS[state_dict_type]
    config = as_own(state_dict_config, [wanted]) or wanted()
    optim_config = as_own(optim_state_dict_config, [optim_wanted]) or optim_wanted()
    for argument, given, expected in (
        ("state_dict_config", config, wanted),
        ("optim_state_dict_config", optim_config, optim_wanted),
    ):
        if type(given) is not expected:
            raise WrapperStateError(
                f"Expected {argument} of type sherd.{expected.__name__} but got {type(given).__module__}."
                f"{type(given).__name__}: it belongs to the state_dict_type"
            )
    if isinstance(config, ShardedStateDictConfig):
        config.require_one_form()
    before = get_state_dict_type(module)
    for state in _states(module):
        state.use(StateDictSettings(state_dict_type, config, optim_config))
    return before if before is not None else StateDictSettings(None, None, None)


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Returns the settings of the wrappers at and below `module`; None if there is no wrapper.

    Raises:
        WrapperStateError: the settings differ (an AssertionError, as in FSDP1).
    """
    settings: StateDictSettings | None = None
    for state in _states(module):
        if settings is not None and state.settings != settings:
            raise WrapperStateError(
                f"All FSDP modules must have the same state dict settings. Got {settings} and {state.settings}; set "
                "them on the root"
            )
        settings = state.settings
    return settings


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the kind of state dict within this context. The old settings come back, also if the body raises.

    Raises:
        SherdError: the errors of `set_state_dict_type`.
    """
    advice.of_state_dict_type(for_a_while=True)
    before = [(state, state.settings) for state in _states(module)]
    _set(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.use(settings)


def _states(module: nn.Module) -> list[WrapperState]:
    return [state for state in map(find_state, module.modules()) if state is not None]


# Optimizer state


def _settings(model: nn.Module) -> tuple[bool, OptimStateDictConfig]:
    """Returns whether the model's wrappers give full states, and their config."""
    settings = get_state_dict_type(model)
    if settings is None or settings.optim_state_dict_config is None:
        return True, FullOptimStateDictConfig()
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT, settings.optim_state_dict_config


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Returns the state of `optim` by the names of the user's own model, full or sharded as `set_state_dict_type` says.

    A full state has plain unsharded tensors. A sharded or local state has DTensors with the parameters' layout, in the
    optimizer's own memory unless they are offloaded; with `_use_dtensor` they are copies, `Shard(0)`.

    Args:
        model: sharded by wrappers, by `fully_shard`, by both, or not at all.
        optim: any optimizer of some or all of its parameters.
        optim_state_dict: what `optim.state_dict()` returned; None calls it.
        group: the ranks whose rank 0 gets the state, where rank 0 alone gets it. None: all ranks.

    Raises:
        OptimStateError: the optimizer has a parameter that is not the model's, or ranks have different states.
    """
    full, config = _settings(model)
    is_kept = not (full and is_on_rank0_only(config)) or dist.get_rank(group) == 0
    form = Form(full, config.in_rows, config.offload_to_cpu, is_kept)
    return state_by_name(Catalog(model), optim, optim_state_dict, form)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Turn a state by names, full or sharded in any way, into what `optim.load_state_dict` takes on this rank.

    The state may come from another wrapping, another front end, or another number of ranks. If rank 0 alone gets full
    states (`set_state_dict_type`), only rank 0's state is read.

    Args:
        model: as for `optim_state_dict`.
        optim: the optimizer that is to load it.
        optim_state_dict: what `optim_state_dict` returned.
        is_named_optimizer: the optimizer keys its own state by `model.named_parameters()`.
        load_directly: call `optim.load_state_dict` too.
        group: the ranks that rank 0 sends to. None: all ranks.

    Raises:
        OptimStateError: the state does not fit the model (a ValueError).
    """
    full, config = _settings(model)
    state = from_rank0(optim_state_dict, group) if full and is_on_rank0_only(config) else optim_state_dict
    if isinstance(state, dict) and state.get("state") == {}:
        advice.of_empty_state(optim)
    return to_load(Catalog(model), optim, state, is_named=is_named_optimizer, load_directly=load_directly)


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: object = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Returns the full state in host memory, on rank 0 only unless `rank0_only=False`, whatever the model is set to."""
    advice.of_old_name("full_optim_state_dict", "optim_state_dict")
    advice.of_optim_input(optim_input)
    is_kept = not rank0_only or dist.get_rank(group) == 0
    return state_by_name(Catalog(model), optim, None, Form(full=True, on_host=True, is_kept=is_kept))


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """Returns the sharded state, whatever the model is set to."""
    advice.of_old_name("sharded_optim_state_dict", "optim_state_dict")
    return state_by_name(Catalog(model), optim, None, Form())


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: nn.Module, optim_input: object = None, optim: Optimizer | None = None
) -> StateDict:
    """Turn a full state, which every rank has, into what an optimizer's `load_state_dict` takes on this rank.

    Args:
        full_optim_state_dict: what `full_optim_state_dict` returned.
        model: the model.
        optim_input: what the optimizer was built from, if it is not given: parameters, or dicts with "params", in any
            iterable. None: all parameters of the model, in order.
        optim: the optimizer.

    Raises:
        OptimStateError: the state does not fit the model, or the optimizer input is empty (a ValueError).
        PolicyTypeError: an optimizer input of another type.
    """
    advice.of_old_name("shard_full_optim_state_dict", "optim_state_dict_to_load")
    advice.of_optim_input(optim_input)
    return to_load(Catalog(model), optim, full_optim_state_dict, optim_input=optim_input)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Turn a sharded state into what `optim.load_state_dict` takes on this rank, as `optim_state_dict_to_load` does."""
    advice.of_old_name("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return to_load(Catalog(model), optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: object = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `shard_full_optim_state_dict`, for a full state on rank 0 of `group`; other ranks pass None."""
    advice.of_old_name("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    advice.of_optim_input(optim_input)
    state = from_rank0(full_optim_state_dict, group)
    return to_load(Catalog(model), optim, state, optim_input=optim_input)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: object = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Returns a full state with other keys: names instead of the optimizer's numbers, or numbers instead of names.

    A state that has these keys already, or is empty, is returned itself. No tensor is copied.

    Args:
        optim_state_dict: the state of an optimizer, keyed by names or by numbers.
        optim_state_key_type: the keys of the result.
        model: the model that the optimizer was built from, before it was wrapped, or with its own parameters.
        optim_input: the parameters or groups that the optimizer was built from. None: all parameters in order.
        optim: the optimizer, instead of `optim_input`.

    Raises:
        OptimStateError: names and numbers mixed, keys that the model does not have, a flat parameter, or another type.
    """
    advice.of_optim_input(optim_input)
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
    catalog = Catalog(model)
    groups = catalog.groups_of(optim) if optim is not None else catalog.groups_of_input(optim_input)[0]
    entries = [entry for group in groups for entry in group]
    flat = next((entry for entry in entries if len(entry.members) > 1), None)
    if flat is not None:
        raise OptimStateError(
            f"Each parameter should only map to one parameter name but got {len(flat.members)}: {flat.names}; pass the "
            "model as it was before it was wrapped, or wrap with use_orig_params=True"
        )
    names = [entry.names[0] for entry in entries]
    new_keys: dict[object, str | int] = dict(enumerate(names))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        new_keys = {name: number for number, name in enumerate(names)}

    def new_key(key: object) -> str | int:
        plain = plain_key(key)
        if plain not in new_keys:
            raise OptimStateError(
                f"the state has {key!r}, and the model's optimizer only {list(new_keys)[:5]} and so on; pass the "
                "model, and the optimizer input, that the state was made with"
            )
        return new_keys[plain]

    return {
        "state": {new_key(key): state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(new_key(key) for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }
