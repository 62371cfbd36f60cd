"""What does this rank's optimizer load of a state by names? Each parameter's part, or a flat parameter's vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, full_of_sharded_tensor
from sherd.checkpoint.agreement import State
from sherd.checkpoint.broadcast import NO_STATE, Sent, from_rank0
from sherd.checkpoint.catalog import Catalog, Groups, Member, NamedState
from sherd.checkpoint.relayout import laid_out, vector_of
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import plain_name
from sherd.errors import OptimStateError
from sherd.optim import ELEMENTWISE
from sherd.tensor.ragged import local_part
from sherd.tensor.state_kind import StateKind, kind_of


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: dict[str, Any] | None,
    *,
    optim_input: Any = None,
    is_named: bool = False,
    load_directly: bool = False,
    from_rank_0: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What `optim.load_state_dict` takes on this rank, of a state by names.

    All ranks must call it. Tensors of a parameter's shape are copied: from whole ones, and from DTensors of any layout,
    which may gather. Parameters that `state_dict` says nothing of get no entry, names that the optimizer has not are
    passed over. Plain parameters that are in none of its groups are in none of those returned either, for the user to
    add, unless it is loaded directly.

    Args:
        model: what the optimizer was built from, or a model that has it inside.
        optim: the optimizer; None: one that was built from `optim_input`, or from all parameters in order.
        state_dict: as `optim_state_dict` returns it, from a model wrapped in any way on any number of ranks.
        optim_input: parameters, or dicts with "params".
        is_named: the optimizer's own state dict has names for keys, those of `model.named_parameters()`.
        load_directly: load it, too.
        from_rank_0: only rank 0 of `group` (None: of all) has it, in whole tensors; the others' is not looked at.

    Returns:
        `{"state": {id or name: {key: value}}, "param_groups": [...]}`, grouped as the optimizer is.

    Raises:
        OptimStateError: no "state"; a tensor that is not of its parameter's shape; names that the model does not have;
            parameters of one flat parameter of which some are missing, or have other keys or numbers than the rest;
            parameters of one group that were in several.
    """
    if optim is not None and not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    catalog = Catalog(model)
    groups, choices = _groups(catalog, optim, optim_input)
    given = _read(state_dict, from_rank_0, group)
    strangers = _strangers(given, catalog)
    strict = optim is None or isinstance(optim, ELEMENTWISE)
    listed = enumerate(each for of_group in groups for each in of_group)
    keys: dict[int, Any] = {id(each): each.path if is_named else number for number, each in listed}
    states: dict[Any, Any] = {}
    # In the model's order, which ranks share; an optimizer may be built from parameters in any.
    for owned in catalog.owned:
        state = _state_of(owned, given["state"], strict) if id(owned) in keys else None
        if state is not None:
            kept = state if optim is None else _as_kept(state, optim.state.get(owned.parameter))
            states[keys[id(owned)]] = kept
    if not load_directly:
        groups = _without_users_own(given, groups)
    loaded = {"state": states | strangers, "param_groups": _numbered_groups(given, groups, choices, keys)}
    if load_directly:
        assert optim is not None, "there is something to load it into"
        optim.load_state_dict(loaded)
    return loaded


def _groups(catalog: Catalog, optim: Optimizer | None, optim_input: Any) -> tuple[Groups, list[dict[str, Any]]]:
    if optim is None:
        return catalog.groups_of_input(optim_input)
    choices = [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]
    return catalog.groups_of(optim), choices


def _read(state_dict: dict[str, Any] | None, from_rank_0: bool, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The state under names without wrappers."""
    if from_rank_0:
        state_dict = from_rank0(state_dict, group)
    if not isinstance(state_dict, dict) or "state" not in state_dict:
        raise OptimStateError(NO_STATE)
    numbers = [key for key in state_dict["state"] if isinstance(key, int)]
    if numbers:
        raise OptimStateError(
            f"the state is keyed by numbers ({numbers[:3]}...), and names are expected; pass it through "
            "rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model) with the model it was saved from"
        )
    return {**state_dict, "state": {_plain(key): value for key, value in state_dict["state"].items()}}


def _plain(key: Any) -> Any:
    return plain_name(key) if isinstance(key, str) else key


def _strangers(given: dict[str, Any], catalog: Catalog) -> dict[Any, Any]:
    """What a user has put among the states, under a key that is no parameter's.

    Raises:
        OptimStateError: it was a parameter's when it was saved.
    """
    known = set(catalog.names)
    saved = {_plain(name) for group in given.get("param_groups", ()) for name in group["params"]}
    unknown = [key for key in given["state"] if key not in known]
    gone = [key for key in unknown if key in saved]
    if gone:
        raise OptimStateError(
            f"the state has {gone[:5]}{' and others' if len(gone) > 5 else ''}, which the model does not have; load it "
            "into the model it was saved from, or rename or delete these entries first"
        )
    return {key: _taken(given["state"][key]) for key in unknown}


def _taken(value: Any) -> Any:
    """A copy of something, received if only rank 0 has it."""
    if isinstance(value, dict):
        return {key: _taken(each) for key, each in value.items()}
    if isinstance(value, Sent):
        return value.take()
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


# The state of what is owned


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One parameter's state. `keys`: in the order they were in. `parts`: what has an element for each of its own;
    `others`: what has not."""

    keys: list[str]
    parts: dict[str, DTensor]
    others: State


def _state_of(owned: NamedState, states: dict[str, State], strict: bool) -> State | None:
    present = [each for each in owned.members if each.name in states]
    if not present:
        return None
    if owned.is_flat:
        return _merged(owned, {each.name: _loaded(each, owned, states[each.name], strict) for each in present})
    (member,) = present
    if member.spec is None:
        for key, value in states[member.name].items():
            _check_shape(member, key, value, strict)
        return {key: _plain_copy(value, owned) for key, value in states[member.name].items()}
    loaded = _loaded(member, owned, states[member.name], strict)
    return {key: loaded.parts.get(key, loaded.others.get(key)) for key in loaded.keys}


def _as_kept(state: State, kept: State | None) -> State:
    """In the optimizer's own order, and plain parts for one that works with those: as far as it has state yet, which
    shows it."""
    kept = kept or {}
    tensors = {key: value for key, value in kept.items() if isinstance(value, torch.Tensor) and value.dim()}
    plain = {key for key, value in tensors.items() if not isinstance(value, DTensor)}
    state = {key: state[key] for key in (*kept, *state) if key in state}
    return {
        key: local_part(value) if key in plain and isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _plain_copy(value: Any, owned: NamedState) -> Any:
    """For a plain parameter: whole."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    found = _taken(value)
    return found.to(owned.parameter.device) if isinstance(found, torch.Tensor) and found.dim() else found


def _loaded(member: Member, owned: NamedState, state: State, strict: bool) -> _Loaded:
    """A member's state, cut as the member is; each value must be asked for on all ranks."""
    assert member.spec is not None, "it lies over ranks"
    device = local_part(owned.parameter).device
    parts: dict[str, DTensor] = {}
    others: State = {}
    for key, value in state.items():
        _check_shape(member, key, value, strict)
        if not isinstance(value, torch.Tensor | Sent):
            others[key] = copy.deepcopy(value)
            continue
        tensor = _received(value, member.spec)
        if kind_of(key, tensor, member.shape) is StateKind.ELEMENTS:
            parts[key] = laid_out(tensor, member.spec, device)
        else:
            others[key] = tensor.detach().clone()
    return _Loaded(list(state), parts, others)


def _received(value: torch.Tensor | Sent, spec: DTensorSpec) -> torch.Tensor:
    """The tensor that rank 0 sends, or that is in parts of FSDP1's own kind."""
    if isinstance(value, Sent):
        return value.take()
    full = full_of_sharded_tensor(value, torch.device(spec.mesh.device_type))
    return value if full is None else full


def _check_shape(member: Member, key: str, value: Any, strict: bool) -> None:
    """Of an optimizer known to keep nothing else, each tensor with dimensions is of the parameter's shape."""
    if strict and isinstance(value, torch.Tensor | Sent) and len(value.shape) and value.shape != member.shape:
        raise OptimStateError(
            "Tensor optimizer state does not have same shape as its parameter: "
            f"{tuple(value.shape)} {tuple(member.shape)}, state {key!r} of {member.name}; load it into the model that "
            "it was saved from"
        )


# Flat parameters


def _merged(owned: NamedState, loaded: dict[str, _Loaded]) -> State:
    """One state, of those of all members.

    Raises:
        OptimStateError: one is missing, or differs in its keys, its dtypes, or in what is not cut.
    """
    first = next(iter(loaded.values()))
    missing = [each.name for each in owned.members if each.name not in loaded and each.shape.numel()]
    if missing:
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype, but there is none for {missing}, which {list(loaded)} have; these parameters are one flat "
            "parameter here: load with use_orig_params=True, or save from a model in which all of them had gradients"
        )
    if any(set(each.keys) != set(first.keys) or each.parts.keys() != first.parts.keys() for each in loaded.values()):
        have = {name: sorted(each.keys) for name, each in loaded.items()}
        raise OptimStateError(
            f"Differing optimizer state names for the unflattened parameters: {have}; they are one flat parameter "
            "here, and need the same"
        )
    merged: State = {}
    for key in first.keys:
        values = {name: each.parts.get(key, each.others.get(key)) for name, each in loaded.items()}
        if key in first.parts:
            _require_same(key, values, lambda value: value.dtype)
            merged[key] = vector_of({name: each.parts[key] for name, each in loaded.items()}, owned)
        else:
            _require_same(key, values, _said)
            merged[key] = first.others[key]
    return merged


def _require_same(key: str, values: dict[str, Any], what: Callable[[Any], Any]) -> None:
    found = {name: what(value) for name, value in values.items()}
    if len({repr(each) for each in found.values()}) > 1:
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype but got {found} for state {key}; load with use_orig_params=True, or step them together"
        )


def _said(value: Any) -> Any:
    return (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value


# Parameter groups


def _without_users_own(given: dict[str, Any], groups: Groups) -> Groups:
    """Without plain parameters that the state says nothing of, as FSDP1: what looks after those adds their entries."""
    if "param_groups" not in given:
        return groups
    saved = {_plain(name) for group in given["param_groups"] for name in group["params"]}
    return [[each for each in group if each.spec is not None or not saved.isdisjoint(each.names)] for group in groups]


def _numbered_groups(
    given: dict[str, Any], groups: Groups, choices: list[dict[str, Any]], keys: dict[int, Any]
) -> list[dict[str, Any]]:
    """The optimizer's own groups, with the hyper-parameters that their parameters had when they were saved."""
    saved = given.get("param_groups", ())
    group_of = {_plain(name): at for at, group in enumerate(saved) for name in group["params"]}
    numbered = []
    for at, (of_group, own) in enumerate(zip(groups, choices, strict=True)):
        sources = {group_of[name]: name for each in of_group for name in each.names if name in group_of}
        if len(sources) > 1:
            raise OptimStateError(
                f"group {at} of the optimizer has parameters that were in {len(sources)} groups when they were saved: "
                f"{', '.join(f'{name} in {source}' for source, name in sources.items())}; build the optimizer with the "
                "same groups"
            )
        found = saved[next(iter(sources))] if sources else {}
        found = {key: copy.deepcopy(value) for key, value in found.items() if key not in ("params", "param_names")}
        numbered.append({**own, **found, "params": [keys[id(each)] for each in of_group]})
    return numbered
