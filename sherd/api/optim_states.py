"""The wrapper's static methods for optimizer state: FSDP1's names and signatures for `sherd.checkpoint`.

`set_state_dict_type` of the wrappers says which form a state has; a model without wrappers has FSDP1's default, the
full state on all ranks in host memory. All ranks must call each of these.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sherd.api import advice
from sherd.api.state_dict_settings import get_state_dict_type
from sherd.api.state_dict_type import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    StateDict,
    StateDictType,
)
from sherd.checkpoint import catalog, loading, saving


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
    optimizer's own memory unless they are offloaded; with `_use_dtensor` they are `Shard(0)`.

    Args:
        model: sharded by wrappers, by `fully_shard`, by both, or not at all.
        optim: any optimizer of some or all of its parameters.
        optim_state_dict: what `optim.state_dict()` returned; None calls it.
        group: the ranks whose rank 0 gets the state, where rank 0 alone gets it. None: all ranks.

    Raises:
        OptimStateError: the optimizer has a parameter that is not the model's, or ranks have different states.
    """
    full, config = _settings(model)
    return saving.optim_state_dict(
        model,
        optim,
        optim_state_dict,
        full=full,
        rank0_only=config._on_rank0_only,
        offload_to_cpu=config.offload_to_cpu,
        in_rows=config.in_rows,
        group=group,
    )


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
    return loading.optim_state_dict_to_load(
        model,
        optim,
        optim_state_dict,
        is_named=is_named_optimizer,
        load_directly=load_directly,
        from_rank_0=full and config._on_rank0_only,
        group=group,
    )


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: object = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Returns the full state in host memory, whatever the model is set to; on rank 0 only, unless `rank0_only=False`.
    `optim_input` is not needed."""
    advice.of_old_name("full_optim_state_dict", "optim_state_dict")
    advice.of_optim_input(optim_input)
    return saving.optim_state_dict(model, optim, full=True, rank0_only=rank0_only, group=group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """Returns the sharded state, whatever the model is set to."""
    advice.of_old_name("sharded_optim_state_dict", "optim_state_dict")
    return saving.optim_state_dict(model, optim, full=False, offload_to_cpu=False, group=group)


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
        OptimStateError: it does not fit the model, or the optimizer input is empty (a ValueError).
        PolicyTypeError: another optimizer input.
    """
    advice.of_old_name("shard_full_optim_state_dict", "optim_state_dict_to_load")
    advice.of_optim_input(optim_input)
    return loading.optim_state_dict_to_load(model, optim, full_optim_state_dict, optim_input=optim_input)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Turn a sharded state into what `optim.load_state_dict` takes on this rank, as `optim_state_dict_to_load` does."""
    advice.of_old_name("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return loading.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: object = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `shard_full_optim_state_dict`, for a full state that rank 0 of `group` has; other ranks pass None."""
    advice.of_old_name("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    advice.of_optim_input(optim_input)
    return loading.optim_state_dict_to_load(
        model, optim, full_optim_state_dict, optim_input=optim_input, from_rank_0=True, group=group
    )


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: catalog.OptimStateKeyType,
    model: nn.Module,
    optim_input: object = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Call `sherd.checkpoint.catalog.rekey_optim_state_dict`, where it is described."""
    advice.of_optim_input(optim_input)
    return catalog.rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)
