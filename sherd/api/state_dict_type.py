"""Which kind of state dict was a wrapper told to give? FSDP1's choices, kept on each wrapper.

Names, fields and defaults are those of torch 2.13's `torch.distributed.fsdp`; `ShardedStateDictConfig.form` is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn

from sherd.api import advice
from sherd.api.module import FSDPModule
from sherd.errors import PolicyError, PolicyTypeError, WrapperStateError

SETTINGS = "_sherd_state_dict_settings"
"""The attribute of a wrapper that has its `StateDictSettings`."""


class StateDictType(Enum):
    """What the values of a state dict are."""

    FULL_STATE_DICT = auto()
    """Whole plain tensors."""
    LOCAL_STATE_DICT = auto()
    """What each rank holds, as the optimizer sees it: flat parameters where there are any."""
    SHARDED_STATE_DICT = auto()
    """Each parameter under its own name, as what this rank holds of it."""


class ShardedForm(Enum):
    """As what a sharded state dict shows a parameter."""

    RUNS = auto()
    """A `RaggedDTensor`: the shard itself, nothing is copied or sent. For `torch.distributed.checkpoint`."""
    ROWS = auto()
    """A DTensor of torch's own, `Shard(0)`, as FSDP1 gives for a `device_mesh`; gathered and cut anew."""
    SHARDED_TENSOR = auto()
    """A `ShardedTensor` of rows, as FSDP1 gives without a `device_mesh`; gathered and cut anew."""


@dataclass
class StateDictConfig:
    """How values are given. `offload_to_cpu`: in host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Of a full state dict. `rank0_only`: the other ranks of the shard axis get nothing of what is sharded."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Of a local state dict."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Of a sharded state dict. `_use_dtensor` asks for `ShardedForm.ROWS`."""

    _use_dtensor: bool = False
    form: ShardedForm = ShardedForm.RUNS

    @property
    def wanted(self) -> ShardedForm:
        """The form, whichever field says it."""
        return ShardedForm.ROWS if self._use_dtensor else self.form


@dataclass
class OptimStateDictConfig:
    """How optimizer state is given. `offload_to_cpu`: in host memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Of full optimizer state. `rank0_only`: the other ranks get nothing."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Of local optimizer state."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Of sharded optimizer state; `_use_dtensor` as for the model's."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The kind of state dict, of the model and of optimizers. All None: of a module without wrappers."""

    state_dict_type: StateDictType | None
    state_dict_config: StateDictConfig | None
    optim_state_dict_config: OptimStateDictConfig | None


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Those of a new wrapper: everything whole, on every rank."""
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def settings_of(wrapper: nn.Module) -> StateDictSettings:
    """The settings of one wrapper."""
    found: StateDictSettings = wrapper.__dict__[SETTINGS]
    return found


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set which kind of state dict the wrappers at and below `module` give; None: that kind's default config.

    Returns:
        The settings before; all None if there is no wrapper.

    Raises:
        PolicyTypeError: no `StateDictType`.
        WrapperStateError: a config of another kind, or wrappers that differ by now (a RuntimeError, AssertionError).
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
    if not isinstance(state_dict_type, StateDictType):
        raise PolicyTypeError(
            f"state_dict_type={state_dict_type!r}: expected a sherd.StateDictType, got a "
            f"{type(state_dict_type).__module__}.{type(state_dict_type).__name__}"
        )
    wanted, optim_wanted = _CONFIGS[state_dict_type]
    config = wanted() if state_dict_config is None else state_dict_config
    optim_config = optim_wanted() if optim_state_dict_config is None else optim_state_dict_config
    _require_kind("state_dict_config", config, wanted)
    _require_kind("optim_state_dict_config", optim_config, optim_wanted)
    if isinstance(config, ShardedStateDictConfig):
        _check_form(config)
    before = get_state_dict_type(module)
    for each in _wrappers(module):
        each.__dict__[SETTINGS] = StateDictSettings(state_dict_type, config, optim_config)
    return before if before is not None else StateDictSettings(None, None, None)


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """The settings of the wrappers at and below `module`; None if there is none.

    Raises:
        WrapperStateError: they differ (an AssertionError, as in FSDP1).
    """
    found: StateDictSettings | None = None
    for each in _wrappers(module):
        its = settings_of(each)
        if found is not None and its != found:
            raise WrapperStateError(
                f"All FSDP modules must have the same state dict settings. Got {found} and {its}; set them on the root"
            )
        found = its
    return found


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Within this context wrappers give that kind of state dict; the old settings come back, also if the body raises.

    Raises:
        SherdError: what `set_state_dict_type` raises.
    """
    advice.of_state_dict_type(for_a_while=True)
    before = [(each, settings_of(each)) for each in _wrappers(module)]
    _set(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for wrapper, settings in before:
            wrapper.__dict__[SETTINGS] = settings


def _wrappers(module: nn.Module) -> list[nn.Module]:
    found = [each for each in module.modules() if isinstance(each, FSDPModule)]
    return [each for each in found if SETTINGS in each.__dict__]


def _require_kind(argument: str, config: Any, wanted: type) -> None:
    if type(config) is not wanted:
        raise WrapperStateError(
            f"Expected {argument} of type sherd.{wanted.__name__} but got {type(config).__module__}."
            f"{type(config).__name__}: it belongs to the state_dict_type"
        )


def _check_form(config: ShardedStateDictConfig) -> None:
    if not isinstance(config.form, ShardedForm):
        raise PolicyTypeError(f"ShardedStateDictConfig(form={config.form!r}): expected a sherd.ShardedForm")
    if config._use_dtensor and config.form is ShardedForm.SHARDED_TENSOR:
        raise PolicyError(
            "ShardedStateDictConfig(_use_dtensor=True, form=SHARDED_TENSOR) asks for two forms; leave one of them out"
        )
