"""Private marks that torch's FSDP, DDP, tensor parallelism and Dynamo leave on modules, and look for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from sherd._torch.tensors import write_into

_MANAGED = "_sherd_managed"


def is_replicated(module: torch.nn.Module) -> bool:
    """Returns whether torch's composable `replicate`, which is DDP, was applied to the module.

    Neither the package nor its registry of what was applied has a public name (2.0 to 2.15).
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


def is_fsdp_of_torch(module: torch.nn.Module) -> bool:
    """Returns whether torch's own FSDP manages the module.

    Such a module is an FSDP1 wrapper, or has a class of FSDP2, or is below one of these and has their mark for
    Dynamo, which has no public name (2.0 to 2.15).
    """
    # The name of the base's module tells without an import of torch's FSDP.
    if any(base.__module__.startswith("torch.distributed.fsdp.") for base in type(module).__mro__):
        return True
    return bool(module.__dict__.get("_is_fsdp_managed_module")) and _MANAGED not in module.__dict__


def manage(module: torch.nn.Module) -> None:
    """Have Dynamo take the parameters of `module` as inputs of the graph, as it does for torch's FSDP.

    Otherwise Dynamo guards each parameter object, which changes on every gather. Nothing public does this (2.0 to
    2.15).
    """
    for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", _MANAGED):
        write_into(module, name, True)


def say_fully_sharded(module: torch.nn.Module) -> None:
    """Have torch's composable `replicate` (DDP) leave `module` and all below it alone, as for torch's `fully_shard`.

    `replicate` asks a registry, which has no public name, nor has its package (2.0 to 2.15).
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry

    registry = _get_registry(module)
    if registry is None:
        write_into(module, REGISTRY_KEY, {"fully_shard": RegistryItem()})
    else:
        registry.setdefault("fully_shard", RegistryItem())


def is_tensor_parallel(module: torch.nn.Module) -> bool:
    """Returns whether `parallelize_module` or `distribute_module` has distributed the module's own parameters.

    Both write an attribute without a public name (2.3 to 2.15).
    """
    return getattr(module, "_distribute_module_applied", False) is True


class GatherState:
    """The part of torch's FSDPState that a tensor reads of its module to tell a gather for backward from others.

    Tensor subclasses of Transformer Engine send the planes of one phase alone, and no public name says which that is
    (2.11 to 2.15). The `phase` that sherd gives would replace it.
    """

    was_read = False
    _training_state: Any
    _reshard_after_forward: bool

    @classmethod
    def of(cls, module: torch.nn.Module | None, phase: str) -> GatherState | None:
        """Write the state of a gather for `phase` on `module`. Returns None if no tensor can have asked for it.

        It stays there: modules ask whether there is one.
        """
        torchs = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_common")
        state = getattr(module, "_get_fsdp_state", None)
        if torchs is None or module is None or not (state is None or isinstance(state, cls)):
            return None
        if state is None:
            state = module._get_fsdp_state = cls()  # type: ignore[assignment]
        state.begin(phase, torchs.TrainingState)
        return state

    def begin(self, phase: str, states: Any) -> None:
        """Take the attributes of a gather for `phase`. `states` are torch's."""
        self._training_state = states.PRE_BACKWARD if phase == "backward" else states.FORWARD
        self._reshard_after_forward, self.was_read = phase != "both", False

    def __call__(self) -> GatherState:
        return self

    @property
    def _fsdp_param_group(self) -> GatherState:
        self.was_read = True
        return self
