"""An optimizer's state by parameter name: gathered, or as DTensors laid out as the parameters.

Ranks first compare their states. Otherwise a rank without some state would hang the others, or pair their collectives
wrongly. A rank that holds no element of a parameter may have no state for it, since optimizers may skip empty tensors:
it is given empty parts, and the numbers that the other ranks have.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import local_tensor
from sherd.checkpoint.catalog import Catalog, Member, OptimizerEntry, StateDict
from sherd.checkpoint.encoding import Tensors, encoded
from sherd.comm.agreement import gathered_along
from sherd.comm.mesh import DataMesh
from sherd.engine import ShardedParameter, watcher
from sherd.errors import CheckpointError, OptimStateError, in_short
from sherd.tensor.local_step import nothing_of, owned_layout
from sherd.tensor.ragged import memory_of, own_view
from sherd.tensor.relayout import around, as_rows, full_of, gathered_vector, laid_out, lies_as
from sherd.tensor.state_kind import State, StateKind, copy_of, state_kind


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a state.

    Args:
        full: gather tensors. Otherwise they are DTensors in the parameters' layout, in the optimizer's own memory.
        in_rows: DTensors are torch's own, and ragged ones are redistributed as `Shard(0)`. As in torch's FSDP1, a later
            step does not change them.
        on_host: put tensors into host memory.
        is_kept: False on a rank that takes part in the collectives, and gets {}.
    """

    full: bool = False
    in_rows: bool = False
    on_host: bool = False
    is_kept: bool = True

    def of_part(self, part: DTensor) -> object:
        """Returns a tensor with the same sharding as its parameter: gathered, in rows, or as it is."""
        if self.full:
            return self.placed(full_of(part))
        return self.placed(as_rows(part).clone() if self.in_rows else part)

    def placed(self, value: object) -> object:
        """Returns a tensor on the host if the state is to be offloaded; anything else as it is."""
        is_moved = self.on_host and self.is_kept
        return value.cpu() if is_moved and isinstance(value, torch.Tensor) and value.device.type != "cpu" else value


def state_by_name(
    catalog: Catalog,
    optim: Optimizer,
    given: StateDict | None,
    form: Form,
    compare: bool = True,
    own: dict[str, State] | None = None,
) -> StateDict:
    """Returns the state of `optim`, by the names that its parameters have in the user's own model.

    All ranks must call it. State with an element for each element of a parameter is returned as one tensor of the
    parameter's shape; all other state (counts of steps, numbers) as it is. Parameters without state have no entry. The
    form of the dict is that of `torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict`.

    `given` is the optimizer's state, keyed by id or by the model's names; None: `optim.state_dict()`. If it has no
    "param_groups", neither has the result. With `compare` ranks compare their states first: all ranks must do so if one
    of them `needs_comparison`, or if the state is gathered. `own` takes this rank's values, by name of the parameter
    and by key, of state that differs between ranks without being parts of one tensor. None: such state is refused.

    Raises:
        OptimStateError: a parameter of the optimizer is not in the catalog, or ranks have different states.
    """
    if not optim.state:
        watcher.adopt(optim)  # it may have been built before the model was sharded
    raw: StateDict = type(optim).state_dict(optim) if given is None else given  # torch may have patched its own
    groups = catalog.groups_of(optim)
    by_key: dict[object, OptimizerEntry] = {}
    if "param_groups" in raw:
        for saved, group in zip(raw["param_groups"], groups, strict=True):
            by_key.update(zip(saved["params"], group, strict=True))
    else:
        # A user has left out the groups: the keys are numbers as an optimizer gives them.
        by_key.update(enumerate(entry for group in groups for entry in group))
    states: dict[int, State] = {}
    named: dict[object, State] = {}
    users_own: dict[object, State] = {}
    for key, state in raw["state"].items():
        entry = catalog.at(key) if isinstance(key, str) else by_key.get(key)
        if entry is None:
            warnings.warn(
                f"Found a optim state, {key}, that FSDP cannot process: it belongs to no parameter of the model. It is "
                "handed on as it is",
                stacklevel=3,
            )
            users_own[key] = state
        else:
            states[id(entry)] = {name: _recognised(name, value, entry) for name, value in state.items()}
    if compare:
        agree(catalog.all_entries, states, own)
    # In the model's order, which all ranks share. The order of the optimizer's parameters may differ between them.
    for entry in catalog.all_entries:
        if id(entry) in states:
            for name, state in _by_name(entry, states[id(entry)], form):
                if form.is_kept:
                    named[name] = state
    if not form.is_kept:
        return {}
    complete: StateDict = {"state": named | users_own}
    if "param_groups" in raw:
        complete["param_groups"] = [
            {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            | {"params": [name for entry in group for name in entry.names]}
            for saved, group in zip(raw["param_groups"], groups, strict=True)
        ]
    return complete


def _recognised(key: str, value: Any, entry: OptimizerEntry) -> object:
    """Returns the state of a scalar's element as a DTensor, if torch has loaded it as a plain tensor."""
    if entry.spec is None or entry.parameter.dim() or isinstance(value, DTensor):
        return value
    is_element = state_kind(key, value, entry.parameter.shape) is StateKind.ELEMENTS
    return laid_out(value, entry.spec, value.device) if is_element else value


def _by_name(entry: OptimizerEntry, state: State, form: Form) -> Iterator[tuple[str, State]]:
    """Yields the names of the members, and the state of each. Collective if the state is to be full."""
    parts, others = _parts_of(state, entry)
    if (form.full or form.in_rows) and entry.span is None:
        # The state shares nothing with the optimizer, whose next step would change its count of steps.
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
    for number, member in enumerate(entry.members):
        assert member.spec is not None, "a member of a flat parameter is sharded"
        of_member: State = {}
        for key in state:
            if key in others:
                of_member[key] = copy_of(others[key])
            elif not form.full:
                of_member[key] = form.of_part(around(own_view(views[key][number]), member.spec))
            else:
                # A copy, or the gathered vectors of all members would live as long as one of them.
                part = views[key][number].view(member.unsharded_shape)
                spec = member.unsharded_spec
                of_member[key] = form.placed(part.clone() if spec is None else full_of(around(part, spec)))
        yield member.name, of_member


def _parts_of(state: State, entry: OptimizerEntry) -> tuple[dict[str, DTensor], State]:
    """Returns the values of a state that are DTensors, laid out as the entry, and all others.

    A DTensor of another shape has no elements of a flat parameter. It is gathered, and each member gets it.
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


# The comparison of ranks

PART, NUMBER, VALUE, OTHER = "a part of a tensor", "a number", "a value", "an object"
AT_OWNER = "a tensor of another shape, complete at the parameter's owner"
LIKE_PART = "a plain tensor of the shape of this rank's part"
"""It is a part if every rank has a tensor of the shape of its part. Otherwise the shape is a coincidence."""


@dataclass(frozen=True, slots=True)
class _Description:
    """A value of a state as a rank describes it to the others. `value` is set if it is short, else a digest."""

    kind: str
    dtype: torch.dtype | None = None
    value: object = None
    digest: str = ""

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" of {self.dtype}"
        return f"{self.kind if self.kind == PART else self.value}{dtype}"


_Holding = tuple[int, dict[str, _Description]]
"""A rank's part of one parameter: the number of its elements, and its state by key."""


def needs_comparison(catalog: Catalog, optim: Optimizer) -> bool:
    """Returns True if only all ranks can tell what the state of `optim` is.

    A plain tensor may be a part of a sharded one, other values may be each rank's own, and a rank may have no state of
    a parameter that it holds no element of.

    Raises:
        OptimStateError: a parameter of the optimizer is not in the catalog.
    """
    if not optim.state:
        watcher.adopt(optim)
    entries = [entry for group in catalog.groups_of(optim) for entry in group if entry.spec is not None]
    return any(not entry.local_shape.numel() and not optim.state.get(entry.parameter) for entry in entries) or any(
        not isinstance(value, DTensor) and _described(key, value, entry, digests=False).kind in (LIKE_PART, OTHER)
        for entry in entries
        for key, value in optim.state.get(entry.parameter, {}).items()
    )


def complete_owned(optimizer: Optimizer) -> None:
    """Give this rank its empty parts of the state that other ranks own. All ranks must call it.

    Raises:
        OptimStateError: ranks have different state, or an owner has objects that have no parts.
    """
    records = [
        record for group in optimizer.param_groups for each in group["params"] if (record := ShardedParameter.of(each))
    ]
    entries = [
        OptimizerEntry(each.name, each.shard, (Member(each.name, each.shard, each.shape),))
        for each in sorted(records, key=lambda each: each.name)
    ]
    states = {id(each): dict(optimizer.state[each.parameter]) for each in entries if each.parameter in optimizer.state}
    agree(entries, states)
    for entry in entries:  # in one order on all ranks, as they gather in the order of the state
        optimizer.state.pop(entry.parameter, None)
        if id(entry) in states:
            optimizer.state[entry.parameter] = states[id(entry)]


def agree(entries: list[OptimizerEntry], states: dict[int, State], own: dict[str, State] | None = None) -> None:
    """Complete `states` (by the id of the entry), so that all ranks have the same keys for each of `entries`.

    Plain tensors that are parts become DTensors. What is each rank's own goes to `own`, by name and key. All ranks that
    hold parts must call it.

    Raises:
        OptimStateError: ranks that hold elements of a parameter have different state for it, or state of their own
            where `own` is None. On all ranks.
    """
    by_mesh: dict[DataMesh | None, list[OptimizerEntry]] = {}
    for entry in entries:
        if entry.spec is not None:
            record = ShardedParameter.of(entry.parameter)
            by_mesh.setdefault(None if record is None else record.mesh, []).append(entry)
    for mesh, sharded in by_mesh.items():
        own_holdings: list[_Holding] = []
        for entry in sharded:
            described = {key: _described(key, value, entry) for key, value in states.get(id(entry), {}).items()}
            own_holdings.append((entry.local_shape.numel(), described))
        groups = () if mesh is None else mesh.piece_groups
        by_rank = gathered_along(groups, own_holdings, "the comparison of optimizer states")
        for entry, *holdings in zip(sharded, *by_rank, strict=True):
            mine = states.setdefault(id(entry), {})
            private = _private(holdings)
            if private and own is None:
                raise OptimStateError(
                    f"{entry.names[0]}: its state {in_short(private)} is each rank's own and no part of one tensor "
                    "(codes, lists, objects); only sherd.save saves such state, for a load by as many ranks"
                )
            owners = _of_one_rank(holdings) if own is not None else []
            kept = {key: mine.pop(key) for key in owners if key in mine}
            if own is not None and private:
                own[entry.names[0]] = {key: mine.pop(key, None) for key in private}
            left = {*private, *owners}
            holdings = [(numel, {key: of[key] for key in of if key not in left}) for numel, of in holdings]
            expected = _agreed(entry, holdings)
            states[id(entry)] = {key: _completed(mine, key, entry, each) for key, each in expected.items()} | kept
            if not states[id(entry)]:
                del states[id(entry)]


def _private(holdings: list[_Holding]) -> list[str]:
    """Returns the keys of values that are each rank's own: they are no parts of a tensor, and differ."""
    keys = dict.fromkeys(key for _, of in holdings for key, value in of.items() if value.kind == OTHER)
    held = {key: [of.get(key) for numel, of in holdings if numel or key in of] for key in keys}
    absent = {key for key in keys if any(key not in of for _, of in holdings)}
    one = _of_one_rank(holdings)
    return [
        key
        for key, of in held.items()
        if key not in one and None not in of and (key in absent or len(set(map(_value_of, of))) > 1)
    ]


def _value_of(description: _Description | None) -> str:
    """Returns what is equal for equal values, also if one rank's has the shape of its part."""
    return (description.digest if description is not None else "") or repr(description)


def _of_one_rank(holdings: list[_Holding]) -> list[str]:
    """Returns the keys of objects of the only rank that holds elements: they are the parameter's, not the rank's."""
    held = [of for numel, of in holdings if numel or of]
    return [key for key, value in held[0].items() if value.kind == OTHER] if len(holdings) > len(held) == 1 else []


def _digest(value: object) -> str:
    """Returns a digest of an object with tensors, or "" if it is of a kind that checkpoints do not take."""
    tensors = Tensors()
    try:
        digest = hashlib.blake2b(repr(encoded(value, "", tensors.keep)).encode(), digest_size=16)
        for tensor in tensors.values():
            digest.update(
                f"{tensor.dtype}{tuple(tensor.shape)}".encode() + memory_of(tensor.detach().cpu().contiguous())
            )
    except CheckpointError:
        return ""
    return digest.hexdigest()


def _described(key: str, value: object, entry: OptimizerEntry, digests: bool = True) -> _Description:
    if isinstance(value, torch.Tensor):
        kind = state_kind(key, value, entry.parameter.shape, entry.local_shape)
        if kind is StateKind.OTHER and owned_layout(value) is not None:
            return _Description(AT_OWNER, value.dtype, tuple(value.shape))
        if kind is StateKind.ELEMENTS:
            if isinstance(value, DTensor):
                return _Description(PART, value.dtype)
            # Of a shape that few elements have by coincidence: then ranks compare the values.
            is_hashed = digests and value.numel() < 4096
            return _Description(LIKE_PART, value.dtype, digest=_digest(value) if is_hashed else "")
        if kind is StateKind.NUMBER:
            return _Description(NUMBER, value.dtype, value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return _Description(VALUE, None, value)
    is_hashed = digests and not isinstance(value, DTensor)
    return _Description(OTHER, None, type(value).__name__, _digest(value) if is_hashed else "")


def _agreed(entry: OptimizerEntry, holdings: list[_Holding]) -> dict[str, _Description]:
    """Returns the state that every rank has for `entry`, in the order of the first rank with state.

    Raises:
        OptimStateError: a rank has other state than the others.
    """
    not_parts = {
        key for _, described in holdings for key, value in described.items() if value.kind not in (LIKE_PART, PART)
    }

    def resolved(key: str, value: _Description) -> _Description:
        if value.kind != LIKE_PART:
            return value
        if key not in not_parts:
            return _Description(PART, value.dtype)
        return _Description(OTHER, None, "Tensor", value.digest)

    by_rank = [{key: resolved(key, value) for key, value in described.items()} for _, described in holdings]
    expected: dict[str, _Description] = {}
    for described in by_rank:
        for key, value in described.items():
            expected.setdefault(key, value)
    first = next((rank for rank, described in enumerate(by_rank) if described), None)
    for rank, ((numel, _), described) in enumerate(zip(holdings, by_rank, strict=True)):
        for key, value in expected.items():
            own = described.get(key)
            if own is None and (numel or value.kind == OTHER):
                raise OptimStateError(
                    f"{entry.names[0]}: rank {rank} keeps no {key!r} for it, which other ranks do; build the optimizer "
                    "from the same parameters on all ranks, and step it on all or on none"
                )
            if own is not None and repr(own) != repr(value):  # as text, where nan equals nan
                raise OptimStateError(
                    f"{entry.names[0]}: Rank {rank} has different values for {key}: {own}. Other ranks: {value} (rank "
                    f"{first}); step the optimizer on all ranks or on none"
                )
    return expected


def _completed(state: State, key: str, entry: OptimizerEntry, expected: _Description) -> object:
    """Returns the value under `key`, a DTensor if it is a part. A rank that holds no element may have to make it."""
    if expected.kind == PART:
        assert entry.spec is not None, "plain parameters are not compared"
        if key not in state:
            empty = torch.empty(entry.local_shape, dtype=expected.dtype, device=entry.parameter.device)
            return around(empty, entry.spec)
        return state[key] if isinstance(state[key], DTensor) else around(state[key], entry.spec)
    if key in state:
        return state[key]
    if expected.kind == AT_OWNER:
        assert isinstance(expected.value, tuple), "it is a shape"
        return nothing_of(entry.parameter, expected.value, expected.dtype)
    return torch.tensor(expected.value, dtype=expected.dtype) if expected.kind == NUMBER else expected.value
