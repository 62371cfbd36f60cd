"""A state by parameter names, cut for this rank's optimizer.

A tensor of the state may not be in memory yet (`Awaited`): rank 0 has it, or a checkpoint's file. All ranks await the
same tensors in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import DTensorSpec, full_of_sharded_tensor, local_tensor
from sherd.checkpoint.catalog import Catalog, Member, OptimizerEntry, ParamGroup, StateDict, plain_key
from sherd.comm.failures import named
from sherd.comm.mesh import default_device_type
from sherd.comm.objects import broadcast_object
from sherd.engine import watcher
from sherd.errors import OptimStateError
from sherd.optim.loaded import at_rest, rest_of
from sherd.tensor.local_step import Span
from sherd.tensor.optimizers import ELEMENTWISE
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around, full_of, laid_out
from sherd.tensor.state_kind import PlacesState, State, StateKind, state_kind

T = TypeVar("T")


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
    """Returns a state by names in the form that `optim.load_state_dict` takes on this rank. All ranks must call it.

    State of a parameter's shape is copied, from unsharded tensors and from DTensors of any layout, which may gather. A
    parameter without state in `state_dict` gets no entry, and the state of a parameter that the optimizer does not own
    is ignored. As with FSDP1, plain parameters that are in no group of `state_dict` are in no group of the result:
    their owner adds them. They are kept if the state is loaded directly.

    Without `optim` the result is for an optimizer built from `optim_input` (parameters, or dicts with "params"), or
    from all parameters in order. If `is_named`, its keys are names of `model.named_parameters()` instead of numbers.
    `load_directly` loads the state into `optim`, too; `as_it_comes` replaces its state parameter by parameter, so that
    the old and the new state are never both in memory. After an error, some parameters then have new state.

    Raises:
        OptimStateError: there is no "state"; a tensor is not of its parameter's shape; the model lacks names of the
            state; members of one flat parameter lack state, or have other keys or numbers than the others; parameters
            of one group were in several.
    """
    _require_state(state_dict)
    if optim is not None and not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    if optim is None:
        groups, hyperparameters = catalog.groups_of_input(optim_input)
    else:
        groups = catalog.groups_of(optim)
        own_groups = optim.param_groups
        hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in own_groups]
    numbers = [key for key in state_dict["state"] if isinstance(key, int)]
    if numbers:
        raise OptimStateError(
            f"the state is keyed by numbers ({numbers[:3]}...), and names are expected; pass it through "
            "rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model) with the model it was saved from"
        )
    saved = {plain_key(key): state for key, state in state_dict["state"].items()}
    saved_groups: list[ParamGroup] = state_dict.get("param_groups", [])
    group_of = {plain_key(name): number for number, group in enumerate(saved_groups) for name in group["params"]}
    users_own = _users_own(saved, catalog, group_of)
    strict = optim is None or isinstance(optim, ELEMENTWISE)
    entries = [entry for group in groups for entry in group]
    keys: dict[int, object] = {id(entry): entry.path if is_named else at for at, entry in enumerate(entries)}
    states: dict[object, State] = {}
    # In the model's order, which all ranks share. The order of the optimizer's parameters may differ between them.
    for entry in catalog.all_entries:
        loaded = _state_of(entry, saved, strict, optim) if id(entry) in keys else None
        if loaded is not None:
            kept = None if optim is None else optim.state.get(entry.parameter)
            state = states[keys[id(entry)]] = loaded.as_kept(kept or {})
            if as_it_comes and kept is not None:
                kept.clear()
                kept.update(state)
    if not load_directly and "param_groups" in state_dict:
        # As with FSDP1, the owner of plain parameters in no saved group adds their entries.
        groups = [
            [entry for entry in group if entry.spec is not None or not group_of.keys().isdisjoint(entry.names)]
            for group in groups
        ]
    complete = {
        "state": states | users_own,
        "param_groups": [
            {**own, **_saved_hyperparameters(at, group, saved_groups, group_of), "params": [keys[id(e)] for e in group]}
            for at, (group, own) in enumerate(zip(groups, hyperparameters, strict=True))
        ],
    }
    if load_directly:
        assert optim is not None, "a state is loaded directly into an optimizer"
        type(optim).load_state_dict(optim, complete)
    return complete


def _require_state(state_dict: StateDict | None) -> StateDict:
    """Returns `state_dict`. Raises `OptimStateError` if it has no "state"."""
    if not isinstance(state_dict, dict) or "state" not in state_dict:
        raise OptimStateError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict; pass what '
            "optim_state_dict() has returned"
        )
    return state_dict


def _users_own(saved: dict[object, State], catalog: Catalog, group_of: dict[object, int]) -> dict[object, object]:
    """Returns copies of the states under a user's own keys, which are no parameter's.

    Raises:
        OptimStateError: a key was a parameter's when the state was saved.
    """
    known = set(catalog.names)
    unknown = [key for key in saved if key not in known]
    gone = [key for key in unknown if key in group_of]
    if gone:
        raise OptimStateError(
            f"the state has {gone[:5]}{' and others' if len(gone) > 5 else ''}, which the model does not have; load it "
            "into the model it was saved from, or rename or delete these entries first"
        )
    return {key: _copied(saved[key]) for key in unknown}


def _saved_hyperparameters(
    number: int, group: list[OptimizerEntry], saved_groups: list[ParamGroup], group_of: dict[object, int]
) -> ParamGroup:
    """Returns copies of the hyper-parameters that the parameters of group `number` had when they were saved."""
    sources = {group_of[name]: name for entry in group for name in entry.names if name in group_of}
    if len(sources) > 1:
        raise OptimStateError(
            f"group {number} of the optimizer has parameters that were in {len(sources)} groups when they were saved: "
            f"{', '.join(f'{name} in {source}' for source, name in sources.items())}; build the optimizer with the "
            "same groups"
        )
    source = saved_groups[next(iter(sources))] if sources else {}
    return {key: copy.deepcopy(value) for key, value in source.items() if key not in ("params", "param_names")}


# Tensors that are not in memory yet


@dataclass(frozen=True, slots=True)
class Awaited:
    """A tensor of a state, of `shape`, that `take` brings into memory: all ranks call it, in the same order.

    `take` gets the layout in which the tensor is wanted, and may return a DTensor of that layout.
    """

    shape: torch.Size
    take: Callable[[DTensorSpec | None], torch.Tensor]


def _tensor_of(value: object, spec: DTensorSpec | None = None) -> torch.Tensor | None:
    """Returns `value`, uncopied, if it is a tensor or an awaited one; else None."""
    if isinstance(value, Awaited):
        return value.take(spec)
    return value if isinstance(value, torch.Tensor) else None


def _copied(value: object) -> object:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_copied, value))
    tensor = _tensor_of(value)
    return copy.deepcopy(value) if tensor is None else tensor.detach().clone()


def from_rank0(state_dict: StateDict | None, group: dist.ProcessGroup | None) -> StateDict:
    """Returns the `state_dict` of rank 0 of `group`, its tensors `Awaited`. All ranks of `group` must call it.

    Its tensors are unsharded. Rank 0 sends an outline of its state at once, and each tensor when all ranks take it.

    Raises:
        OptimStateError: it has no "state", or it has DTensors, of which rank 0 has only a part. On all ranks.
    """
    tensors: list[torch.Tensor] = []
    error, outline = "", {}
    if dist.get_rank(group) == 0:
        try:
            state_dict = _require_state(state_dict)
            states = {name: _outlined(state, tensors, name) for name, state in state_dict["state"].items()}
            outline = {**state_dict, "state": states}
        except OptimStateError as raised:
            error = str(raised)
    error, outline = broadcast_object((error, outline), "rank 0's broadcast of optimizer state", group)
    if error:
        raise OptimStateError(error)

    return {**outline, "state": _awaited(outline["state"], tensors, group)}


@dataclass(frozen=True, slots=True)
class _Outlined:
    """A tensor in the outline of a state; `number` counts all tensors of rank 0's state."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


def _awaited(value: object, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> object:
    """Returns an outline with tensors that rank 0, which has `tensors`, broadcasts when they are asked for."""
    if isinstance(value, dict):
        return {key: _awaited(item, tensors, group) for key, item in value.items()}
    if not isinstance(value, _Outlined):
        return value
    return Awaited(value.shape, partial(_broadcast, value, tensors[value.number] if tensors else None, group))


def _outlined(value: object, tensors: list[torch.Tensor], name: str) -> object:
    """Returns a value of the state `name` without the data of its tensors, which are appended to `tensors`."""
    if isinstance(value, dict):
        return {key: _outlined(item, tensors, name) for key, item in value.items()}
    if isinstance(value, DTensor):
        raise OptimStateError(
            f"{name}: rank 0 has DTensors, of which it holds a part, and rank0_only asks for full tensors from "
            "it; save with the full state dict type, or load on all ranks"
        )
    if not isinstance(value, torch.Tensor):
        return value
    tensors.append(value)
    return _Outlined(len(tensors) - 1, value.shape, value.dtype)


def _broadcast(
    outlined: _Outlined, tensor: torch.Tensor | None, group: dist.ProcessGroup | None, _: DTensorSpec | None
) -> torch.Tensor:
    """Returns rank 0's `tensor`, which is None on the other ranks."""
    device = torch.device(default_device_type(group))
    if tensor is None:
        received = torch.empty(outlined.shape, dtype=outlined.dtype, device=device)
    else:
        received = tensor.detach().to(device).contiguous()
    with named("rank 0's broadcast of optimizer state", group):
        dist.broadcast(received, group=group, group_src=0)
    return received if outlined.shape else received.cpu()  # optimizers read a count of steps on the host


# The state of one entry


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The state of one parameter. `parts` are the keys of DTensors with an element for each of the parameter's."""

    state: State
    parts: frozenset[str] = frozenset()

    def as_kept(self, kept: State) -> State:
        """Returns the state in the form of `kept`, the optimizer's state so far.

        Keys are in the same order, and this rank's parts are plain tensors where `kept` has plain tensors.
        """
        plain = {
            key
            for key, value in kept.items()
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor)
        }
        ordered = {key: self.state[key] for key in (*kept, *self.state) if key in self.state}
        return {key: local_part(value) if key in plain else value for key, value in ordered.items()}


def _state_of(
    entry: OptimizerEntry, saved: dict[object, State], strict: bool, optim: Optimizer | None
) -> _Loaded | None:
    """Returns a copy of the state of an entry; None if it has none. With `strict`, all tensors have its shape."""
    present = [member for member in entry.members if member.name in saved]
    for member in present if strict else ():
        for key, value in saved[member.name].items():
            shape = value.shape if isinstance(value, torch.Tensor | Awaited) else None
            if shape and shape != member.parameter.shape:
                raise OptimStateError(
                    "Tensor optimizer state does not have same shape as its parameter: "
                    f"{tuple(shape)} {tuple(member.parameter.shape)}, state {key!r} of {member.name}; load it into the "
                    "model that it was saved from"
                )
    if not present:
        return None
    device = rest_of(entry.parameter).device
    if entry.span is None:
        (member,) = present
        return _loaded(member, saved[member.name], device, optim if isinstance(optim, PlacesState) else None)
    return _merged(entry, entry.span, {member.name: _loaded(member, saved[member.name], device) for member in present})


def _loaded(member: Member, state: State, device: torch.device, placing: PlacesState | None = None) -> _Loaded:
    """Returns a copy of a member's state on `device`, cut as the member is. Collective, one value after the other."""
    spec = member.spec
    copies: State = {}
    parts: set[str] = set()
    for key, value in state.items():
        shape = getattr(value, "shape", torch.Size())
        own = None if placing is None else placing.spec_of_state(member.parameter, key, shape)
        tensor = _tensor_of(value, own or spec)
        if tensor is None:
            copies[key] = _copied(value)
        elif own is not None:
            copies[key] = at_rest(member.parameter, laid_out(tensor, own, device))
        elif spec is None:
            # Not `clone`, which torchao's state in 8 bits does not know.
            own_copy = full_of(tensor) if isinstance(tensor, DTensor) else tensor.detach().to(tensor.device, copy=True)
            copies[key] = own_copy.to(device) if own_copy.dim() else own_copy  # a count of steps stays on the host
        else:
            # Torch's FSDP1 saves a sharded state as a ShardedTensor.
            full = full_of_sharded_tensor(tensor, torch.device(spec.mesh.device_type))
            tensor = tensor if full is None else full
            if state_kind(key, tensor, member.parameter.shape) is StateKind.ELEMENTS:
                copies[key] = at_rest(member.parameter, laid_out(tensor, spec, device))
                parts.add(key)
            else:
                copies[key] = tensor.detach().clone()
    return _Loaded(copies, frozenset(parts))


# Flat parameters


def _merged(entry: OptimizerEntry, span: Span, loaded: dict[str, _Loaded]) -> _Loaded:
    """Returns the states of all members as one.

    Raises:
        OptimStateError: a state is missing, or differs from the others in its keys, its dtypes or its numbers.
    """
    first = next(iter(loaded.values()))
    missing = [member.name for member in entry.members if member.name not in loaded and member.parameter.numel()]
    if missing:
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype, but there is none for {missing}, which {list(loaded)} have; these parameters are one flat "
            "parameter here: load with use_orig_params=True, or save from a model in which all of them had gradients"
        )
    if any(one.state.keys() != first.state.keys() or one.parts != first.parts for one in loaded.values()):
        keys = {name: sorted(one.state) for name, one in loaded.items()}
        raise OptimStateError(
            f"Differing optimizer state names for the unflattened parameters: {keys}; they are one flat parameter "
            "here, and need the same"
        )
    assert entry.spec is not None, "a flat parameter is sharded"
    state = dict(first.state)
    for key in first.state:
        of_members = {name: one.state[key] for name, one in loaded.items()}
        if key not in first.parts:
            _require_same(key, of_members, _comparable)
            continue
        _require_same(key, of_members, lambda part: part.dtype)
        parts = [local_tensor(of_members[name]) if name in loaded else None for name in entry.names]
        state[key] = around(span.vector(parts, first.state[key].dtype), entry.spec)
    return _Loaded(state, first.parts)


def _require_same(key: str, values: dict[str, T], property_of: Callable[[T], object]) -> None:
    properties = {name: property_of(value) for name, value in values.items()}
    if len({repr(value) for value in properties.values()}) > 1:  # as text, where nan equals nan
        raise OptimStateError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype but got {properties} for state {key}; load with use_orig_params=True, or step them together"
        )


def _comparable(value: object) -> object:
    return (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value
