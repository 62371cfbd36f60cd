"""The kinds of state dict that a wrapper can be told to give, with FSDP1's config for each.

Names, fields and defaults are those of torch 2.13's `torch.distributed.fsdp`; `ShardedStateDictConfig.form` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from sherd.errors import PolicyError, PolicyTypeError

StateDict: TypeAlias = dict[str, Any]
"""The state of a model or of an optimizer, by key."""


class StateDictType(Enum):
    """The kind of values that a state dict has."""

    FULL_STATE_DICT = auto()
    """Plain unsharded tensors."""
    LOCAL_STATE_DICT = auto()
    """This rank's part in the form that the optimizer has, which is flat parameters where there are any."""
    SHARDED_STATE_DICT = auto()
    """Each parameter under its own name, as this rank's shard."""


class ShardedForm(Enum):
    """The type of a parameter in a sharded state dict."""

    RUNS = auto()
    """A `RaggedDTensor`: the shard itself, nothing is copied or sent. For `torch.distributed.checkpoint`."""
    ROWS = auto()
    """A DTensor of torch's own, `Shard(0)`, as FSDP1 gives for a `device_mesh`; gathered and cut again."""
    SHARDED_TENSOR = auto()
    """A `ShardedTensor` of rows, as FSDP1 gives without a `device_mesh`; gathered and cut again."""


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state. Names and members are those of `torch.distributed.fsdp.OptimStateKeyType`."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Options of a state dict. `offload_to_cpu`: values are in host memory."""

    offload_to_cpu: bool = False

    @property
    def _wanted(self) -> ShardedForm:
        return ShardedForm.RUNS


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict. `rank0_only`: other ranks of the shard axis get no sharded parameter."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict. `_use_dtensor` asks for `ShardedForm.ROWS`."""

    _use_dtensor: bool = False
    form: ShardedForm = ShardedForm.RUNS

    @property
    def _wanted(self) -> ShardedForm:
        return ShardedForm.ROWS if self._use_dtensor else self.form

    def require_one_form(self) -> None:
        """Raise `PolicyTypeError` if `form` is no form, `PolicyError` if `_use_dtensor` contradicts `form`."""
        if not isinstance(self.form, ShardedForm):
            raise PolicyTypeError(f"ShardedStateDictConfig(form={self.form!r}): expected a sherd.ShardedForm")
        if self._use_dtensor and self.form is ShardedForm.SHARDED_TENSOR:
            raise PolicyError(
                "ShardedStateDictConfig(_use_dtensor=True, form=SHARDED_TENSOR) asks for two forms; leave one of them "
                "out"
            )


@dataclass
class OptimStateDictConfig:
    """Options of optimizer state. `offload_to_cpu`: values are in host memory."""

    offload_to_cpu: bool = True

    @property
    def in_rows(self) -> bool:
        """Returns whether shards are rows, as DTensors of torch's own."""
        return False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of full optimizer state. `rank0_only`: other ranks get nothing."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of local optimizer state."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of sharded optimizer state. `_use_dtensor` is that of `ShardedStateDictConfig`."""

    _use_dtensor: bool = False

    @property
    def in_rows(self) -> bool:
        return self._use_dtensor


@dataclass
class StateDictSettings:
    """The kind of state dict, of the model and of optimizers. All fields are None for a module without wrappers."""

    state_dict_type: StateDictType | None
    state_dict_config: StateDictConfig | None
    optim_state_dict_config: OptimStateDictConfig | None


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def is_on_rank0_only(config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Returns True for a full state that is for rank 0 alone."""
    return isinstance(config, FullStateDictConfig | FullOptimStateDictConfig) and config.rank0_only


def default_settings() -> StateDictSettings:
    """Returns the settings of a new wrapper: full state dicts on every rank."""
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
