"""`optim_state_dict`: an optimizer's state by parameter name, gathered, or as DTensors laid out as the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import local_tensor, spec_of
from sherd.checkpoint.agreement import agree
from sherd.checkpoint.catalog import Catalog, Entry, Groups, Member, ParamGroup, StateDict
from sherd.checkpoint.relayout import around, as_rows, full_of, gathered_vector, laid_out, lies_as
from sherd.engine import watcher
from sherd.tensor.state_kind import State, StateKind, copy_of, kind_of


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    given: StateDict | None = None,
    *,
    full: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = True,
    in_rows: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Returns the state of `optim`, by the names that the parameters have in the user's own model.

    All ranks must call it. State with an element for each element of a parameter is returned as one tensor of the
    parameter's shape; all other state (counts of steps, numbers) as it is. The names and the two forms are those of
    `torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict`.

    Args:
        model: the model that the optimizer was built from, or one that contains it.
        optim: the optimizer.
        given: the optimizer's state, keyed by id or by the model's names. None: `optim.state_dict()`. If it has no
            "param_groups", neither has the result.
        full: gather tensors. Otherwise they are DTensors that lie as the parameters do and share the optimizer's
            memory.
        rank0_only: gather on rank 0 of `group` (None: of all ranks) alone. The others take part and return an empty
            dict.
        offload_to_cpu: return tensors in host memory.
        in_rows: cut ragged DTensors anew as `Shard(0)`.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}`; parameters without state have
        no entry.

    Raises:
        OptimStateError: a parameter of the optimizer is not the model's, or ranks have different states.
    """
    if not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    raw: StateDict = type(optim).state_dict(optim) if given is None else given  # torch may have patched its own
    catalog = Catalog(model)
    groups = catalog.groups_of(optim)
    states, users_own = _sorted_out(raw, groups, catalog)
    agree(catalog.entries, states)
    is_returned = not (full and rank0_only) or dist.get_rank(group) == 0
    form = _Form(full, in_rows, offload_to_cpu and is_returned)
    named: dict[object, State] = {}
    # In the model's order, which all ranks share. The order of the optimizer's parameters may differ between them.
    for entry in catalog.entries:
        if id(entry) not in states:
            continue
        for name, state in _by_name(entry, states[id(entry)], form):
            if is_returned:
                named[name] = state
    if not is_returned:
        return {}
    param_groups = {"param_groups": _named_groups(raw, groups)} if "param_groups" in raw else {}
    return {"state": named | users_own, **param_groups}


def needs_comparison(catalog: Catalog, optim: Optimizer) -> bool:
    """Returns whether a rank cannot tell alone what the state of `optim` is: it has a plain tensor that may be its part
    of a sharded one. Raises as `state_in_parts`."""
    if not optim.state:
        watcher.adopt(optim)
    entries = [entry for group in catalog.groups_of(optim) for entry in group if entry.spec is not None]
    return any(_has_plain_part(optim.state.get(entry.parameter, {}), entry) for entry in entries)


def state_in_parts(catalog: Catalog, optim: Optimizer, compare: bool) -> StateDict:
    """Returns the state of `optim` by name, tensors as DTensors that share its memory.

    Ranks compare their states, as they do in `optim_state_dict`, only with `compare`.

    Raises:
        OptimStateError: a parameter of the optimizer is not in the catalog; or ranks have different states.
    """
    raw: StateDict = type(optim).state_dict(optim)
    groups = catalog.groups_of(optim)
    states, users_own = _sorted_out(raw, groups, catalog)
    if compare:
        agree(catalog.entries, states)
    form = _Form(full=False, in_rows=False, on_host=False)
    held = [(entry, states[id(entry)]) for entry in catalog.entries if id(entry) in states]
    named: dict[object, State] = {name: each for entry, state in held for name, each in _by_name(entry, state, form)}
    return {"state": named | users_own, "param_groups": _named_groups(raw, groups)}


def _has_plain_part(state: State, entry: Entry) -> bool:
    """Returns whether a plain tensor has the shape of this rank's part of the parameter."""
    shape, local = entry.parameter.shape, entry.local_shape
    plain = ((key, value) for key, value in state.items() if not isinstance(value, DTensor))
    return any(kind_of(key, value, shape, local) is StateKind.ELEMENTS for key, value in plain)


def _sorted_out(raw: StateDict, groups: Groups, catalog: Catalog) -> tuple[dict[int, State], dict[object, State]]:
    """Returns the states by the id of their entry, and those that a user has put among them under other keys."""
    by_key: dict[object, Entry] = {}
    if "param_groups" in raw:
        for saved, group in zip(raw["param_groups"], groups, strict=True):
            by_key.update(zip(saved["params"], group, strict=True))
    else:
        # A user has left out the groups: the keys are numbers as an optimizer gives them.
        by_key.update(enumerate(entry for group in groups for entry in group))
    states: dict[int, State] = {}
    users_own: dict[object, State] = {}
    for key, state in raw["state"].items():
        entry = catalog.at(key) if isinstance(key, str) else by_key.get(key)
        if entry is None:
            warnings.warn(
                f"Found a optim state, {key}, that FSDP cannot process: it belongs to no parameter of the model. It is "
                "handed on as it is",
                stacklevel=4,
            )
            users_own[key] = state
        else:
            states[id(entry)] = {name: _recognised(name, value, entry) for name, value in state.items()}
    return states, users_own


def _recognised(key: str, value: Any, entry: Entry) -> object:
    """Returns the state of a scalar's element as a DTensor, if torch has loaded it as a plain tensor."""
    if entry.spec is None or entry.parameter.dim() or isinstance(value, DTensor):
        return value
    is_element = kind_of(key, value, entry.parameter.shape) is StateKind.ELEMENTS
    return laid_out(value, entry.spec, value.device) if is_element else value


@dataclass(frozen=True, slots=True)
class _Form:
    """The form in which state was asked for; `optim_state_dict` explains the choices."""

    full: bool
    in_rows: bool
    on_host: bool

    def of_part(self, part: DTensor) -> object:
        """Returns a piece that lies as its parameter does: gathered, in rows, or as it is."""
        return self.placed(full_of(part) if self.full else as_rows(part) if self.in_rows else part)

    def of_view(self, member: Member, view: torch.Tensor) -> object:
        """Returns the member's part of a vector, which was gathered if the state is to be full."""
        if self.full:
            return self.placed(member.unsharded_state(view))
        return self.of_part(member.sharded_state(view))

    def placed(self, value: object) -> object:
        """Returns a tensor on the host if it was asked for there; anything else as it is."""
        if not self.on_host or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        return around(local_tensor(value).cpu(), spec_of(value)) if isinstance(value, DTensor) else value.cpu()


def _by_name(entry: Entry, state: State, form: _Form) -> Iterator[tuple[str, State]]:
    """Yields the names of the members, and the state of each. Collective if the state is to be full."""
    parts, others = _parts_of(state, entry)
    if form.full and entry.span is None:
        # A full state shares nothing with the optimizer, whose next step would change its count of steps.
        others = {key: copy_of(value) for key, value in others.items()}
    others = {key: form.placed(value) for key, value in others.items()}
    if entry.span is None or entry.unsharded_span is None:
        (member,) = entry.members
        yield member.name, {key: others[key] if key in others else form.of_part(parts[key]) for key in state}
        return
    if form.full:
        views = {key: entry.unsharded_span.views(gathered_vector(part)) for key, part in parts.items()}
    else:
        views = {key: entry.span.views(local_tensor(part).detach()) for key, part in parts.items()}
    for index, member in enumerate(entry.members):
        yield (
            member.name,
            {key: copy_of(others[key]) if key in others else form.of_view(member, views[key][index]) for key in state},
        )


def _parts_of(state: State, entry: Entry) -> tuple[dict[str, DTensor], State]:
    """Returns the pieces of state that are DTensors, laid out as the entry, and all others.

    A DTensor of another shape is no vector of a flat parameter's members: it is gathered, since all of them have it.
    """
    parts: dict[str, DTensor] = {}
    others: State = {}
    for key, value in state.items():
        if not isinstance(value, DTensor):
            others[key] = value
        elif entry.spec is None or lies_as(value, entry.spec):
            parts[key] = value
        elif value.shape == entry.parameter.shape:
            parts[key] = laid_out(value, entry.spec, local_tensor(value).device)
        elif entry.span is None:
            parts[key] = value
        else:
            others[key] = full_of(value)
    return parts, others


def _named_groups(raw: StateDict, groups: Groups) -> list[ParamGroup]:
    """Returns the parameter groups with names under "params". `param_names`, which torch may keep too, is dropped."""
    return [
        {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        | {"params": [name for entry in group for name in entry.names]}
        for saved, group in zip(raw["param_groups"], groups, strict=True)
    ]
