"""What does an optimizer keep for each parameter of the model? By name: whole, or each part where the shard is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import local_tensor, spec_of
from sherd.checkpoint.agreement import State, agree
from sherd.checkpoint.catalog import Catalog, Groups, NamedState
from sherd.checkpoint.relayout import (
    around,
    as_rows,
    cut_out,
    full_of,
    laid_out,
    lies_as,
    part_in,
    vector_gathered,
)
from sherd.engine.state.optimizers import watcher
from sherd.tensor.state_kind import StateKind, copy_of, kind_of


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    given: dict[str, Any] | None = None,
    *,
    full: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = True,
    in_rows: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state of `optim`, by the names that the parameters have in the user's own model.

    All ranks must call it. What an optimizer keeps for each element of a parameter (any tensor of its shape) is there
    as one tensor of that shape; the rest (counts of steps, numbers) as it is.

    Args:
        model: what the optimizer was built from, or a model that has it inside.
        optim: the optimizer.
        given: its state, if `optim.state_dict()` is not to be asked; keyed by id or by the model's names. Without
            "param_groups" there are none in what is returned.
        full: whether tensors are gathered. Otherwise they are DTensors that lie as the parameters do, and share memory
            with the optimizer's.
        rank0_only: gather for rank 0 of `group` (None: of all) alone; the others take part and return an empty dict.
        offload_to_cpu: return tensors in host memory.
        in_rows: of what is not gathered, cut anew as `Shard(0)` what is cut into runs.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`; parameters without state have
        no entry.

    Raises:
        OptimStateError: the optimizer has a parameter that the model has not, or ranks have different states.
    """
    if not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    raw = optim.state_dict() if given is None else given
    catalog = Catalog(model)
    groups = catalog.groups_of(optim)
    states, strangers = _sorted_out(raw, groups, catalog)
    agree(catalog.owned, states)
    kept = not (full and rank0_only) or dist.get_rank(group) == 0
    found: dict[Any, Any] = {}
    # In the model's order, which ranks share; an optimizer may be built from parameters in any.
    for each in catalog.owned:
        for name, state in _by_name(each, states.get(id(each)), full):
            handed = {key: _handed_out(value, full, in_rows, offload_to_cpu and kept) for key, value in state.items()}
            if kept:
                found[name] = handed
    if not kept:
        return {}
    told = {"param_groups": _named_groups(raw, groups)} if "param_groups" in raw else {}
    return {"state": found | strangers, **told}


def _sorted_out(raw: dict[str, Any], groups: Groups, catalog: Catalog) -> tuple[dict[int, State], dict[Any, Any]]:
    """States by the id of what the optimizer owns; and what a user has put among them under a key of their own."""
    by_key = _by_key(raw, groups)
    states: dict[int, State] = {}
    strangers: dict[Any, Any] = {}
    for key, state in raw["state"].items():
        owned = catalog.at(key) if isinstance(key, str) else by_key.get(key)
        if owned is None:
            warnings.warn(
                f"Found a optim state, {key}, that FSDP cannot process: it belongs to no parameter of the model. It is "
                "handed on as it is",
                stacklevel=4,
            )
            strangers[key] = state
        else:
            states[id(owned)] = {name: _recognised(name, value, owned) for name, value in state.items()}
    return states, strangers


def _by_key(raw: dict[str, Any], groups: Groups) -> dict[Any, NamedState]:
    """What has which key among the states: as the groups say, or, where a user has left them out, as an optimizer
    numbers its parameters."""
    if "param_groups" not in raw:
        return dict(enumerate(each for of_group in groups for each in of_group))
    by_key: dict[Any, NamedState] = {}
    for told, of_group in zip(raw["param_groups"], groups, strict=True):
        by_key.update(zip(told["params"], of_group, strict=True))
    return by_key


def _recognised(key: str, value: Any, owned: NamedState) -> Any:
    """The state of a scalar's element as a DTensor, which torch has loaded as a plain tensor."""
    if owned.spec is None or owned.parameter.dim() or isinstance(value, DTensor):
        return value
    is_element = kind_of(key, value, owned.parameter.shape) is StateKind.ELEMENTS
    return laid_out(value, owned.spec, value.device) if is_element else value


def _by_name(owned: NamedState, state: State | None, full: bool) -> Iterator[tuple[str, State]]:
    """The state of each member, laid out as that lies; of a flat parameter already whole if `full`."""
    if state is None:
        return
    laid = {key: _as_owned(value, owned) for key, value in state.items()}
    if not owned.is_flat:
        # Unsharded, it is no longer the optimizer's: else its count of steps would go on while its tensors do not.
        copied = {key: value if isinstance(value, DTensor) else copy_of(value) for key, value in laid.items()}
        yield owned.members[0].name, copied if full else laid
        return
    vectors = {key: value for key, value in laid.items() if lies_as(value, owned.spec)}
    fulls = {key: vector_gathered(value) for key, value in vectors.items()} if full else {}
    for member in owned.members:
        own = {key: copy_of(value) for key, value in laid.items() if key not in vectors}
        for key, value in vectors.items():
            own[key] = cut_out(fulls[key], member) if full else part_in(local_tensor(value), member)
        yield member.name, {key: own[key] for key in laid}


def _as_owned(value: Any, owned: NamedState) -> Any:
    """A DTensor of the owned parameter's shape that lies elsewhere, laid out like it; of another shape, if that is
    flat, gathered: all members have it."""
    if owned.spec is None or not isinstance(value, DTensor) or lies_as(value, owned.spec):
        return value
    if value.shape == owned.parameter.shape:
        return laid_out(value, owned.spec, local_tensor(value).device)
    return full_of(value) if owned.is_flat else value


def _handed_out(value: Any, full: bool, in_rows: bool, offload_to_cpu: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if full and isinstance(value, DTensor):
        value = full_of(value)
    elif in_rows and isinstance(value, DTensor):
        value = as_rows(value)
    if not offload_to_cpu or value.device.type == "cpu":
        return value
    return around(local_tensor(value).cpu(), spec_of(value)) if isinstance(value, DTensor) else value.cpu()


def _named_groups(raw: dict[str, Any], groups: Groups) -> list[dict[str, Any]]:
    """The parameter groups, with names for what they hold. `param_names`, which torch may keep too, says no more."""
    return [
        {key: value for key, value in told.items() if key not in ("params", "param_names")}
        | {"params": [name for each in of_group for name in each.names]}
        for told, of_group in zip(raw["param_groups"], groups, strict=True)
    ]
