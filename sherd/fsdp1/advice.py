"""The wrapper's warnings about probable mistakes and deprecated names, as in FSDP1.

Conditions and categories are those of torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import nn
from torch.optim import Optimizer

from sherd.comm.failures import own_rank


def of_containers(module: nn.Module) -> None:
    """Warn if the wrapped module is a list or a dict of modules, which has no forward that would gather."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        _warn(
            f"a {type(module).__name__} was wrapped, which has no forward, so nothing gathers the parameters in it; "
            "wrap the modules inside, each by itself, or the module around it"
        )


def of_one_rank(num_ranks: int, strategy: str) -> None:
    if num_ranks == 1 and strategy != "NO_SHARD":
        _warn(
            f"sharding_strategy {strategy} on one rank alone, the world size being 1, shards nothing; it trains as "
            "`NO_SHARD` would. Start more ranks, or pass NO_SHARD"
        )


def of_the_host(tensors: Collection[torch.Tensor], computes_on: torch.device) -> None:
    """Warn if the module is in host memory and computes on an accelerator."""
    first = next(iter(tensors), None)
    if first is not None and first.device.type == "cpu" and computes_on.type != "cpu":
        _warn(
            f"the module to wrap is on the CPU and computes on {computes_on}, so it is sharded in host memory, slower "
            "than on the device; pass device_id, or move it there before it is wrapped",
            frames=1,
        )


def of_precise_modules(precise: Collection[nn.Module]) -> None:
    """Warn if mixed precision and an auto-wrap policy leave modules in full precision."""
    if precise:
        kinds = ", ".join(sorted({type(module).__name__ for module in precise}))
        _warn(
            f"mixed_precision and auto_wrap_policy were both given, and there are modules of type {kinds}: "
            "they become units of their own, and compute in full precision. MixedPrecision's "
            "_module_classes_to_ignore says which classes do",
            frames=1,
        )


def of_no_gradients(rank: int, dtype: torch.dtype) -> None:
    _warn(
        f"clip_grad_norm_() found no gradients on rank {rank}, so its norm is of other ranks' alone, in {dtype}; "
        "call it after a backward that reduces, and before zero_grad()",
        frames=1,
    )


def of_many_copies() -> None:
    """Warn that every rank of a host copies all unsharded parameters into host memory."""
    _warn(
        "offload_to_cpu=True with rank0_only=False: every rank of a host copies all unsharded parameters into the "
        "memory that they share; pass rank0_only=True if one copy is enough",
        frames=1,
    )


def of_state_dict_type(for_a_while: bool) -> None:
    """Warn rank 0 of FSDP1's functions for the kind of state dict. `for_a_while` means in a `with` statement."""
    if own_rank() == 0:
        _warn_of_old(
            "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated, as in torch: get_state_dict() and "
            "set_state_dict() of torch.distributed.checkpoint.state_dict serve both front ends",
            frames=1 if for_a_while else 0,
        )


def of_old_name(old: str, new: str) -> None:
    _warn_of_old(f"FullyShardedDataParallel.{old} is deprecated, as in torch, and {new} stands for it")


def of_optim_input(optim_input: object) -> None:
    if optim_input is not None:
        _warn_of_old("the argument `optim_input` is deprecated, as in torch; give the optimizer, as optim, instead")


def of_empty_state(optim: Optimizer) -> None:
    if any(group.get("momentum", True) for group in optim.param_groups):  # SGD without momentum keeps none
        _warn(
            f"the optimizer state to load has no parameter's state, so {type(optim).__name__} starts over. A state "
            "that torch.distributed.checkpoint is to fill must be of an optimizer that has stepped once"
        )


def _warn(text: str, frames: int = 0) -> None:
    # At the user's line: `frames` counts sherd's calls between the user's call and the function of this file.
    warnings.warn(text, stacklevel=4 + frames)


def _warn_of_old(text: str, frames: int = 0) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4 + frames)
