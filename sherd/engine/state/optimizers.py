"""What becomes of an optimizer that was built before its parameters were sharded, and when shards have been stepped.

A plain Parameter cannot turn into a DTensor in place, so such an optimizer holds objects that the model no longer has.
Torch's own FSDP then trains nothing and says nothing. Here, before any optimizer's step, replaced parameters are
exchanged for their successors where the optimizer keeps no state for them yet; where it does, the step raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import dynamo_disabled, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from sherd.engine.state.parameter import Owner, ShardedParameter, record_of
from sherd.engine.state.steppable import require_steppable
from sherd.errors import OptimizerError


class _Watcher:
    """The two global optimizer hooks, and what is known of each optimizer: the units whose shards it steps."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], list[weakref.ref[Owner]]]]
        self._known = weakref.WeakKeyDictionary()
        self._installed = False

    def install(self) -> None:
        """Watch every optimizer's steps from now on."""
        if not self._installed:
            # Disabled for Dynamo: a step may be compiled, and these look at what is not to be traced.
            register_optimizer_step_pre_hook(dynamo_disabled(self._before_step))
            register_optimizer_step_post_hook(dynamo_disabled(self._after_step))
            self._installed = True

    def sharded_again(self) -> None:
        """Parameters have been replaced since: look at every optimizer anew."""
        self._known.clear()

    def adopt(self, optimizer: Optimizer) -> list[weakref.ref[Owner]]:
        """Let `optimizer` have what became of its parameters; return the units that it steps.

        Raises:
            OptimizerError: it cannot have it.
        """
        known = self._known.get(optimizer)
        if known is None or known[0] != _sizes(optimizer):
            owners = _adopt(optimizer)
            self._known[optimizer] = known = (_sizes(optimizer), owners)
        return known[1]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for ref in self.adopt(optimizer):
            owner = ref()
            if owner is not None:
                owner.before_step()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = self._known.get(optimizer)
        if known is None:
            return
        for ref in known[1]:
            owner = ref()
            if owner is not None:
                owner.shards_written()


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def _adopt(optimizer: Optimizer) -> list[weakref.ref[Owner]]:
    """Exchange replaced parameters for their shards, or for flat parameters; return the units that the optimizer steps.

    Raises:
        OptimizerError: there is state for a replaced parameter, the optimizer has the shard as well, it has the
            parameters of a flat one only in part, or not in one group, or it cannot step shards.
    """
    _merge(optimizer)
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, weakref.ref[Owner]] = {}
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            record = record_of(parameter)
            if record is None:
                continue
            if parameter is not record.optimizer_param:
                if record.has_taken(parameter) and id(record.optimizer_param) in present:
                    continue  # it gets no gradients: the other one does
                _move_state(optimizer, parameter, record)
                if id(record.shard) in present:
                    raise OptimizerError(_BOTH.format(kind=type(optimizer).__name__, name=record.name))
                group["params"][position] = record.shard
                present.add(id(record.shard))
            require_steppable(optimizer, group, record)
            owner = record.owner
            if owner is not None:
                owners.setdefault(owner.id, weakref.ref(owner))
    return list(owners.values())


def _merge(optimizer: Optimizer) -> None:
    """Put flat parameters in the place of the first of the parameters that were merged into them.

    Raises:
        OptimizerError: it has only some of them, or in several groups, or the flat parameter as well, or state for one.
    """
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    merged: dict[int, dict[int, tuple[int, ShardedParameter]]] = {}
    for at, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            record = record_of(parameter)
            if record is None or record.flat is None or parameter is record.optimizer_param:
                continue
            if not (record.has_taken(parameter) and id(record.optimizer_param) in present):
                merged.setdefault(id(record.optimizer_param), {})[id(parameter)] = (at, record)
    for members in merged.values():
        _require_mergeable(optimizer, list(members.values()), present)
        at, first = next(iter(members.values()))
        _replace(optimizer.param_groups[at], members.keys(), first.optimizer_param)


def _require_mergeable(
    optimizer: Optimizer, members: list[tuple[int, ShardedParameter]], present: Collection[int]
) -> None:
    kind, (_, first) = type(optimizer).__name__, members[0]
    flat = first.flat
    assert flat is not None, "it was merged"
    names = list(dict.fromkeys(record.name for _, record in members))
    told = f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}"
    away = "build the optimizer from the wrapped model's parameters(), or wrap with use_orig_params=True"
    if id(first.optimizer_param) in present:
        raise OptimizerError(
            f"{kind} holds {told} twice: as before, and in the flat parameter they are part of; {away}"
        )
    if len(names) < len(flat.names):
        raise OptimizerError(
            f"{kind} was built from {told}: {len(names)} of the {len(flat.names)} parameters that are one flat "
            f"parameter now, {', '.join(flat.names[:8])}, which is stepped as a whole; give it all of them, or {away}"
        )
    groups = {record.name: at for at, record in members}
    if len(set(groups.values())) > 1:
        raise OptimizerError(
            f"{kind} has parameters of one flat parameter in several of its groups: "
            f"{', '.join(f'{name} in {at}' for name, at in groups.items())}; put them in one, or {away}"
        )
    records = {id(record) for _, record in members}
    if any(state and id(record_of(parameter)) in records for parameter, state in optimizer.state.items()):
        raise OptimizerError(_STATE.format(kind=kind, name=first.name))


def _replace(group: dict[str, Any], members: Collection[int], flat: nn.Parameter) -> None:
    """Put `flat` in the place of the first of the parameters with these ids, and drop the others."""
    kept = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in members]
    first = next(at for at, parameter in enumerate(group["params"]) if id(parameter) in members)
    order = sorted([*kept, first])
    if "param_names" in group:
        group["param_names"] = [group["param_names"][at] for at in order]
    group["params"][first] = flat
    group["params"][:] = [group["params"][at] for at in order]


def _move_state(optimizer: Optimizer, parameter: nn.Parameter, record: ShardedParameter) -> None:
    """What is kept for a shard is kept for the one that has taken its place (`load_state_dict(assign=True)`)."""
    if not optimizer.state.get(parameter):
        return
    if isinstance(parameter, DTensor):
        optimizer.state[record.shard] = optimizer.state.pop(parameter)
        return
    raise OptimizerError(_STATE.format(kind=type(optimizer).__name__, name=record.name))


_STATE = (
    "{kind} holds state for {name} as it was before fully_shard replaced it; stepping it would train nothing. Build "
    "the optimizer after sharding, and load its state with "
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
)

_BOTH = (
    "{kind} holds {name} twice: as it was before fully_shard replaced it, and as the shard. A module outside every "
    "unit still shows the old one (tied weights?); call fully_shard on a module that contains both"
)

watcher = _Watcher()
