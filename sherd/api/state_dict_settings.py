"""Setting and getting the kind of state dict that wrappers give: FSDP1's `state_dict_type` and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sherd.api import advice
from sherd.api.state_dict_type import (
    CONFIGS,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from sherd.api.wrapper_state import WrapperState, find_state
from sherd.errors import WrapperStateError
from sherd.requirements import require_type


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
        WrapperStateError: a config of another kind, or wrappers whose settings differ (a RuntimeError and an
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
    require_type(f"state_dict_type={state_dict_type!r}: expected a sherd.StateDictType", state_dict_type, StateDictType)
    wanted, optim_wanted = CONFIGS[state_dict_type]
    config = wanted() if state_dict_config is None else state_dict_config
    optim_config = optim_wanted() if optim_state_dict_config is None else optim_state_dict_config
    _require_kind("state_dict_config", config, wanted)
    _require_kind("optim_state_dict_config", optim_config, optim_wanted)
    config._require_one_form()
    before = get_state_dict_type(module)
    for state in _states(module):
        state.use(StateDictSettings(state_dict_type, config, optim_config))
    return before if before is not None else StateDictSettings(None, None, None)


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Returns the settings of the wrappers at and below `module`; None if there is no wrapper.

    Raises:
        WrapperStateError: the settings differ (an AssertionError, as in FSDP1).
    """
    found: StateDictSettings | None = None
    for state in _states(module):
        if found is not None and state.settings != found:
            raise WrapperStateError(
                f"All FSDP modules must have the same state dict settings. Got {found} and {state.settings}; set them "
                "on the root"
            )
        found = state.settings
    return found


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the kind of state dict within this context. The old settings come back, also if its body raises.

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


def _require_kind(argument: str, config: object, wanted: type) -> None:
    if type(config) is not wanted:
        raise WrapperStateError(
            f"Expected {argument} of type sherd.{wanted.__name__} but got {type(config).__module__}."
            f"{type(config).__name__}: it belongs to the state_dict_type"
        )
