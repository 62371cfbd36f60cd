"""`optim_state_dict_to_load`: a state by parameter names, cut for this rank's optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, full_of_sharded_tensor, local_tensor
from sherd.checkpoint.broadcast import Given, from_rank0, given, mapped, require_state
from sherd.checkpoint.catalog import Catalog, Entry, Groups, Member, ParamGroup, StateDict, plain_key
from sherd.checkpoint.relayout import around, full_of, laid_out
from sherd.engine import watcher
from sherd.errors import OptimStateError
from sherd.tensor.local_step import ELEMENTWISE
from sherd.tensor.ragged import local_part
from sherd.tensor.span import Span
from sherd.tensor.state_kind import State, StateKind, kind_of

T = TypeVar("T")


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: StateDict | None,
    *,
    optim_input: object = None,
    is_named: bool = False,
    load_directly: bool = False,
    from_rank_0: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Returns a state by names as `optim.load_state_dict` takes it on this rank.

    All ranks must call it. State of a parameter's shape is copied, from unsharded tensors and from DTensors of any
    layout, which may gather. A parameter without state in `state_dict` gets no entry, and the state of a parameter that
    the optimizer does not have is ignored. Plain parameters that are in no group of `state_dict` are in no group of the
    result either: whoever looks after them adds them, as with FSDP1. If the state is loaded directly, they are there.

    Args:
        model: the model that the optimizer was built from, or one that contains it.
        optim: the optimizer. None: one built from `optim_input`, or from all parameters in order.
        state_dict: the result of `optim_state_dict`, for a model wrapped in any way on any number of ranks.
        optim_input: parameters, or dicts with "params".
        is_named: the keys of the optimizer's own state dict are the names in `model.named_parameters()`.
        load_directly: load the state into `optim`, too.
        from_rank_0: rank 0 of `group` (None: of all ranks) alone has the state, in unsharded tensors. The `state_dict`
            of other ranks is ignored.

    Returns:
        `{"state": {id or name: {key: value}}, "param_groups": [...]}`, grouped as the optimizer is.

    Raises:
        OptimStateError: no "state"; a tensor that is not of its parameter's shape; names that the model does not have;
            members of one flat parameter of which some are missing, or have other keys or numbers than the others;
            parameters of one group that were in several.
    """
    read = from_rank0(state_dict, group) if from_rank_0 else require_state(state_dict)
    return to_load(Catalog(model), optim, read, optim_input=optim_input, is_named=is_named, load_directly=load_directly)


def to_load(
    catalog: Catalog,
    optim: Optimizer | None,
    state_dict: StateDict,
    *,
    optim_input: object = None,
    is_named: bool = False,
    load_directly: bool = False,
    as_it_comes: bool = False,
) -> StateDict:
    """Does what `optim_state_dict_to_load` does for a catalog's parameters, with a `state_dict` that this rank has.

    `as_it_comes`: each parameter's state replaces the optimizer's at once, so that not all of it is there twice. After
    an error some are loaded.
    """
    if optim is not None and not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    if optim is None:
        groups, choices = catalog.groups_of_input(optim_input)
    else:
        groups, choices = (
            catalog.groups_of(optim),
            [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups],
        )
    read = _read(state_dict)
    users_own = _users_own(read, catalog)
    strict = optim is None or isinstance(optim, ELEMENTWISE)
    entries = enumerate(entry for group in groups for entry in group)
    keys: dict[int, object] = {id(entry): entry.path if is_named else number for number, entry in entries}
    states: dict[object, State] = {}
    # In the model's order, which all ranks share. The order of the optimizer's parameters may differ between them.
    for entry in catalog.entries:
        loaded = _state_of(entry, read["state"], strict) if id(entry) in keys else None
        if loaded is not None:
            kept = None if optim is None else optim.state.get(entry.parameter)
            state = states[keys[id(entry)]] = loaded.as_kept(kept or {})
            if as_it_comes and kept is not None:
                kept.clear()
                kept.update(state)
    if not load_directly:
        groups = _without_users_own(read, groups)
    made = {"state": states | users_own, "param_groups": _numbered_groups(read, groups, choices, keys)}
    if load_directly:
        assert optim is not None, "there is something to load it into"
        type(optim).load_state_dict(optim, made)
    return made


def _read(state_dict: StateDict) -> StateDict:
    """Returns the state under names without wrappers."""
    numbers = [key for key in state_dict["state"] if isinstance(key, int)]
    if numbers:
        raise OptimStateError(
            f"the state is keyed by numbers ({numbers[:3]}...), and names are expected; pass it through "
            "rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model) with the model it was saved from"
        )
    return {**state_dict, "state": {plain_key(key): value for key, value in state_dict["state"].items()}}


def _users_own(read: StateDict, catalog: Catalog) -> dict[object, object]:
    """Returns copies of the states that a user has put under keys that are no parameter's.

    Raises:
        OptimStateError: a key was a parameter's when the state was saved.
    """
    known = set(catalog.names)
    saved = {plain_key(name) for group in read.get("param_groups", ()) for name in group["params"]}
    unknown = [key for key in read["state"] if key not in known]
    gone = [key for key in unknown if key in saved]
    if gone:
        raise OptimStateError(
            f"the state has {gone[:5]}{' and others' if len(gone) > 5 else ''}, which the model does not have; load it "
            "into the model it was saved from, or rename or delete these entries first"
        )
    return {key: _copied(read["state"][key]) for key in unknown}


def _copied(value: object) -> object:
    """Returns a copy of a piece of state, of dicts too. A tensor that only rank 0 has is received."""
    return mapped(value, lambda item: given(item).copied())


# The state of an entry


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The state of one parameter. `parts` are the pieces with an element for each of the parameter's, `others` the
    remaining ones; `keys` has the order of both."""

    keys: list[str]
    parts: dict[str, DTensor]
    others: State

    def as_kept(self, kept: State) -> State:
        """Returns the state in the form of the one that the optimizer has kept so far: in its order, and with this
        rank's parts as plain tensors where the optimizer has plain tensors."""
        plain = {
            key
            for key, value in kept.items()
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor)
        }
        present = self.others | self.parts
        ordered = {key: present[key] for key in (*kept, *self.keys) if key in present}
        return {key: local_part(value) if key in plain else value for key, value in ordered.items()}


def _state_of(entry: Entry, states: dict[object, State], strict: bool) -> _Loaded | None:
    present = [member for member in entry.members if member.name in states]
    if strict:
        for member in present:
            _check_shapes(member, states[member.name])
    if not present:
        return None
    device = local_part(entry.parameter).device
    if entry.span is not None:
        return _merged(
            entry, entry.span, {member.name: _loaded(member, states[member.name], device) for member in present}
        )
    (member,) = present
    if member.spec is None:
        state = {key: _plain_copy(value, device) for key, value in states[member.name].items()}
        return _Loaded(list(state), {}, state)
    return _loaded(member, states[member.name], device)


def _plain_copy(value: object, device: torch.device) -> object:
    """Returns an unsharded copy for a plain parameter on `device`. A tensor without dimensions stays where it is."""
    tensor = given(value).take(None)
    if tensor is None:
        return _copied(value)
    copied = full_of(tensor) if isinstance(tensor, DTensor) else tensor.detach().clone()
    return copied.to(device) if copied.dim() else copied


def _loaded(member: Member, state: State, device: torch.device) -> _Loaded:
    """Returns the state of a member on `device`, cut as the member is. Collective, for one piece after the other."""
    spec = member.spec
    assert spec is not None, "the member is sharded"
    parts: dict[str, DTensor] = {}
    others: State = {}
    for key, value in state.items():
        tensor = _received(given(value), spec)
        if tensor is None:
            others[key] = _copied(value)
        elif kind_of(key, tensor, member.shape) is StateKind.ELEMENTS:
            parts[key] = laid_out(tensor, spec, device)
        else:
            others[key] = tensor.detach().clone()
    return _Loaded(list(state), parts, others)


def _received(piece: Given, spec: DTensorSpec) -> torch.Tensor | None:
    """Returns the tensor that `piece` is, that rank 0 sends, or that FSDP1 has saved in parts; None if it is none."""
    tensor = piece.take(spec)
    full = None if tensor is None else full_of_sharded_tensor(tensor, torch.device(spec.mesh.device_type))
    return tensor if full is None else full


def _check_shapes(member: Member, state: State) -> None:
    """Raise if a tensor with dimensions does not have the parameter's shape."""
    for key, value in state.items():
        shape = given(value).shape
        if shape and shape != member.shape:
            raise OptimStateError(
                "Tensor optimizer state does not have same shape as its parameter: "
                f"{tuple(shape)} {tuple(member.shape)}, state {key!r} of {member.name}; load it into the model that it "
                "was saved from"
            )


# Flat parameters


def _merged(entry: Entry, span: Span, loaded: dict[str, _Loaded]) -> _Loaded:
    """Returns the states of all members as one.

    Raises:
        OptimStateError: a state is missing, or differs from the others in its keys, its dtypes or its numbers.
    """
    first = next(iter(loaded.values()))
    missing = [member.name for member in entry.members if member.name not in loaded and member.shape.numel()]
    if missing:
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype, but there is none for {missing}, which {list(loaded)} have; these parameters are one flat "
            "parameter here: load with use_orig_params=True, or save from a model in which all of them had gradients"
        )
    if any(set(state.keys) != set(first.keys) or state.parts.keys() != first.parts.keys() for state in loaded.values()):
        have = {name: sorted(state.keys) for name, state in loaded.items()}
        raise OptimStateError(
            f"Differing optimizer state names for the unflattened parameters: {have}; they are one flat parameter "
            "here, and need the same"
        )
    merged: dict[str, DTensor] = {}
    for key in first.keys:
        if key not in first.parts:
            _require_same(key, {name: state.others[key] for name, state in loaded.items()}, _comparable)
            continue
        _require_same(key, {name: state.parts[key] for name, state in loaded.items()}, lambda part: part.dtype)
        parts = [local_tensor(loaded[name].parts[key]) if name in loaded else None for name in entry.names]
        assert entry.spec is not None, "a flat parameter lies over ranks"
        merged[key] = around(span.vector(parts, first.parts[key].dtype), entry.spec)
    return _Loaded(first.keys, merged, first.others)


def _require_same(key: str, values: dict[str, T], what: Callable[[T], object]) -> None:
    found = {name: what(value) for name, value in values.items()}
    if len({repr(value) for value in found.values()}) > 1:
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype but got {found} for state {key}; load with use_orig_params=True, or step them together"
        )


def _comparable(value: object) -> object:
    return (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value


# Parameter groups


def _without_users_own(read: StateDict, groups: Groups) -> Groups:
    """Returns the groups without plain parameters that are in no group of the state. As with FSDP1, whoever looks after
    those adds their entries."""
    if "param_groups" not in read:
        return groups
    saved = {plain_key(name) for group in read["param_groups"] for name in group["params"]}
    return [
        [entry for entry in group if entry.spec is not None or not saved.isdisjoint(entry.names)] for group in groups
    ]


def _numbered_groups(
    read: StateDict, groups: Groups, choices: list[ParamGroup], keys: dict[int, object]
) -> list[ParamGroup]:
    """Returns the optimizer's own groups, with the hyper-parameters that their parameters had when they were saved."""
    saved = read.get("param_groups", ())
    saved_group_of = {plain_key(name): at for at, group in enumerate(saved) for name in group["params"]}
    numbered = []
    for at, (group, own) in enumerate(zip(groups, choices, strict=True)):
        sources = {saved_group_of[name]: name for entry in group for name in entry.names if name in saved_group_of}
        if len(sources) > 1:
            raise OptimStateError(
                f"group {at} of the optimizer has parameters that were in {len(sources)} groups when they were saved: "
                f"{', '.join(f'{name} in {source}' for source, name in sources.items())}; build the optimizer with the "
                "same groups"
            )
        source: ParamGroup = saved[next(iter(sources))] if sources else {}
        loaded = {key: copy.deepcopy(value) for key, value in source.items() if key not in ("params", "param_names")}
        numbered.append({**own, **loaded, "params": [keys[id(entry)] for entry in group]})
    return numbered
