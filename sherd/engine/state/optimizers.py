"""Hooks on optimizers: they exchange parameters that were sharded since, and tell units that their shards are stepped.

A plain Parameter cannot turn into a DTensor in place, so such an optimizer holds objects that the model no longer has.
With torch's own FSDP it then trains nothing, without an error. Here replaced parameters are exchanged for their shards
before the optimizer steps. If the optimizer has state for one of them already, the step raises.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import dynamo_disabled, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from sherd.comm.agreement import in_short
from sherd.engine.state.parameter import Owner, ShardedParameter, record_of
from sherd.engine.state.steppable import require_shapes, require_steppable
from sherd.errors import OptimizerError
from sherd.tensor.ragged import local_part


@dataclass(eq=False)
class News:
    """The parameters that a model has got and lost, for optimizers that do not know of it yet.

    Args:
        units: the ids of the model's units.
        adopted: the new parameters.
        dropped: the local tensors of parameters that it has no more, and their names. A local tensor lives and dies
            with its parameter, of which no reference is held: torch refuses to move a tensor that has a weak one, a
            strong one would keep the memory, and its id goes to another tensor once it is gone.
    """

    units: frozenset[int]
    adopted: list[weakref.ref[ShardedParameter]]
    dropped: list[tuple[weakref.ref[torch.Tensor], str]]

    def missing_from(self, present: Mapping[int, nn.Parameter], stepped: Collection[int]) -> list[str]:
        """Returns the names of those adopted that are not `present` in an optimizer that steps the units `stepped`.
        What was told, or is in an optimizer, is no news any more."""
        alive = [record for ref in self.adopted if (record := ref()) is not None]
        absent = [each for each in alive if id(each.optimizer_param) not in present]
        is_told = not self.units.isdisjoint(stepped)
        self.adopted = [] if is_told else [weakref.ref(each) for each in absent]
        return [each.name for each in absent if is_told and each.requires_grad]

    def left_in(self, present: Mapping[int, nn.Parameter]) -> list[str]:
        """Returns the names of those dropped that an optimizer still has."""
        plain = [each for each in present.values() if isinstance(each, DTensor) and record_of(each) is None]
        theirs = {id(local_part(each)) for each in plain}
        alive = [(local, ref, name) for ref, name in self.dropped if (local := ref()) is not None]
        self.dropped = [(ref, name) for local, ref, name in alive if id(local) not in theirs]
        return [name for local, _, name in alive if id(local) in theirs]


class StepListener(Protocol):
    """Hears of each optimizer step before it is made."""

    def before_step(self, optimizer: Optimizer, unit_ids: Sequence[int]) -> None:
        """`optimizer` is about to step the shards of these units."""


class _Watcher:
    """The two global optimizer hooks, the hook of each optimizer's loads, and the units whose shards it steps."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], list[weakref.ref[Owner]]]]
        self._known = weakref.WeakKeyDictionary()
        self._asked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
        self._installed = False
        self._news: list[News] = []

    def announce(self, news: News) -> None:
        """Tell every optimizer of it, at its next step."""
        self._news.append(news)
        self.sharded_again()

    def install(self) -> None:
        """Watch every optimizer's steps from now on."""
        if not self._installed:
            # Disabled for Dynamo: a step may be compiled, and the hooks read objects that Dynamo cannot trace.
            register_optimizer_step_pre_hook(dynamo_disabled(self._before_step))
            register_optimizer_step_post_hook(dynamo_disabled(self._after_step))
            self._installed = True

    def sharded_again(self) -> None:
        """Look at every optimizer anew, since parameters have been replaced."""
        self._known.clear()

    def adopt(self, optimizer: Optimizer) -> list[weakref.ref[Owner]]:
        """Give `optimizer` the shards of its parameters. Returns the units that it steps.

        Raises:
            OptimizerError: as `_adopt`.
        """
        known = self._known.get(optimizer)
        if known is None or known[0] != _sizes(optimizer):
            owners = _adopt(optimizer)
            self._tell(optimizer, owners)
            if optimizer not in self._asked:
                optimizer.register_load_state_dict_pre_hook(require_shapes)
                self._asked.add(optimizer)
            self._known[optimizer] = known = (_sizes(optimizer), owners)
        return known[1]

    def _tell(self, optimizer: Optimizer, owners: list[weakref.ref[Owner]]) -> None:
        """Warn of what a model has got, or has no more, where `optimizer` does not know of it."""
        present = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        stepped = {owner.id for ref in owners if (owner := ref()) is not None}
        missing = [name for each in self._news for name in each.missing_from(present, stepped)]
        gone = [name for each in self._news for name in each.left_in(present)]
        self._news = [each for each in self._news if each.adopted or each.dropped]
        kind = type(optimizer).__name__
        if missing:
            warnings.warn(
                f"{kind} steps a model that has got parameters since, and has none of these: {in_short(missing)}. "
                "Nothing trains them unless another optimizer does; pass it to sherd.refresh(model, optimizer), or "
                "call its add_param_group()",
                stacklevel=2,
            )
        if gone:
            warnings.warn(
                f"{kind} holds parameters that its model has no more: {in_short(gone)}. They get no gradients; "
                "pass it to sherd.refresh(model, optimizer), which takes them out",
                stacklevel=2,
            )

    def listen(self, listener: StepListener) -> None:
        """Tell `listener` of each step that is about to be, as long as it exists."""
        self._listeners.add(listener)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        owners = [owner for ref in self.adopt(optimizer) if (owner := ref()) is not None]
        for owner in owners:
            owner.before_step()
        for listener in list(self._listeners):
            listener.before_step(optimizer, [owner.id for owner in owners])

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        known = self._known.get(optimizer)
        if known is None or not known[1]:
            return
        # Foreach and fused forms leave no trace on a DTensor.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stepped = [each for each in parameters if each.grad is not None and isinstance(each, DTensor)]
        torch.autograd.graph.increment_version(stepped)
        for ref in known[1]:
            owner = ref()
            if owner is not None:
                owner.compared.stepped()
                owner.shards_written()


def bring_up_to_date(
    optimizer: Optimizer, adopted: Collection[ShardedParameter], dropped: Collection[nn.Parameter]
) -> None:
    """Add a group of the trainable ones of `adopted`, with the optimizer's defaults, and take out `dropped`, with their
    state."""
    watcher.adopt(optimizer)
    gone = {id(parameter) for parameter in dropped}
    for group in optimizer.param_groups:
        kept = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in gone]
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][at] for at in kept]
    for parameter in dropped:
        optimizer.state.pop(parameter, None)
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    new = [each for each in adopted if each.requires_grad and id(each.optimizer_param) not in present]
    if new:
        named = any("param_names" in group for group in optimizer.param_groups)
        optimizer.add_param_group(
            {"params": [(each.name, each.optimizer_param) if named else each.optimizer_param for each in new]}
        )


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def _adopt(optimizer: Optimizer) -> list[weakref.ref[Owner]]:
    """Exchange replaced parameters for their shards or for flat parameters. Returns the units whose shards it steps.

    Raises:
        OptimizerError: there is state for a replaced parameter, the optimizer has the shard as well, it has the members
            of a flat parameter only in part or in several groups, or it cannot step shards.
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
                    continue  # it gets no gradients, and the shard in its place is there, too
                _move_state(optimizer, parameter, record)
                if id(record.shard) in present:
                    raise OptimizerError(_BOTH.format(kind=type(optimizer).__name__, name=record.name))
                group["params"][position] = record.shard
                present.add(id(record.shard))
            require_steppable(optimizer, record)
            owner = record.owner
            if owner is not None:
                owners.setdefault(owner.id, weakref.ref(owner))
    return list(owners.values())


def _merge(optimizer: Optimizer) -> None:
    """Put flat parameters in the place of their members.

    Raises:
        OptimizerError: the optimizer has only some members, or has them in several groups, or has the flat parameter as
            well, or has state for a member.
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
    shown = f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}"
    away = "build the optimizer from the wrapped model's parameters(), or wrap with use_orig_params=True"
    if id(first.optimizer_param) in present:
        raise OptimizerError(
            f"{kind} holds {shown} twice: as before, and in the flat parameter they are part of; {away}"
        )
    if len(names) < len(flat.names):
        raise OptimizerError(
            f"{kind} was built from {shown}: {len(names)} of the {len(flat.names)} parameters that are one flat "
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
        raise _has_state(optimizer)


def _replace(group: dict[str, Any], members: Collection[int], flat: nn.Parameter) -> None:
    """Put `flat` in the place of the first of `members`, which are ids of parameters, and drop the others."""
    kept = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in members]
    first = next(at for at, parameter in enumerate(group["params"]) if id(parameter) in members)
    order = sorted([*kept, first])
    if "param_names" in group:
        group["param_names"] = [group["param_names"][at] for at in order]
    group["params"][first] = flat
    group["params"][:] = [group["params"][at] for at in order]


def _move_state(optimizer: Optimizer, parameter: nn.Parameter, record: ShardedParameter) -> None:
    """Keep a shard's state for the shard that has taken its place (`load_state_dict(assign=True)`)."""
    if not optimizer.state.get(parameter):
        return
    if not _is_shard_of(record, parameter):
        raise _has_state(optimizer)
    optimizer.state[record.shard] = optimizer.state.pop(parameter)


def _is_shard_of(record: ShardedParameter, parameter: torch.Tensor) -> bool:
    """Returns whether `parameter` lies as the shard does. One that was tensor parallel before it was sharded is a
    DTensor, too, but lies differently."""
    spec = record.shard_spec
    return isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements) == (
        spec.mesh,
        spec.placements,
    )


def _has_state(optimizer: Optimizer) -> OptimizerError:
    """Returns the error for an optimizer with state for parameters that shards have taken the place of, by name."""
    names = [
        record.name
        for parameter, state in optimizer.state.items()
        if state
        and (record := record_of(parameter)) is not None
        and parameter is not record.optimizer_param
        and not _is_shard_of(record, parameter)
    ]
    return OptimizerError(
        f"{type(optimizer).__name__} holds state for {in_short(names)} as before fully_shard, or as inside "
        "sherd.unsharded; stepping these would train nothing. Build the optimizer after sharding, and load its state "
        "with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


_BOTH = (
    "{kind} holds {name} twice: as it was before fully_shard replaced it, and as the shard. A module outside every "
    "unit still shows the old one (tied weights?); call fully_shard on a module that contains both"
)

watcher = _Watcher()
