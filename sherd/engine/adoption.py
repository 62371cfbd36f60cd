"""What becomes of an optimizer that was built before its parameters were sharded, and when shards have been stepped.

A plain Parameter cannot turn into a DTensor in place, so such an optimizer holds objects that the model no longer has.
Torch's own FSDP then trains nothing and says nothing. Here, before any optimizer's step, replaced parameters are
exchanged for their successors where the optimizer keeps no state for them yet; where it does, the step raises.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from sherd.engine.parameter import Owner, ShardedParameter, record_of
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
            register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)
            self._installed = True

    def sharded_again(self) -> None:
        """Parameters have been replaced since: look at every optimizer anew."""
        self._known.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = tuple(len(group["params"]) for group in optimizer.param_groups)
        known = self._known.get(optimizer)
        if known is None or known[0] != groups:
            self._known[optimizer] = known = (groups, _adopt(optimizer))
        for ref in known[1]:
            owner = ref()
            if owner is not None:
                owner.require_own_shards()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = self._known.get(optimizer)
        if known is None:
            return
        for ref in known[1]:
            owner = ref()
            if owner is not None:
                owner.shards_written()


def _adopt(optimizer: Optimizer) -> list[weakref.ref[Owner]]:
    """Exchange replaced parameters for their shards; return the units that the optimizer steps.

    Raises:
        OptimizerError: there is state for a replaced parameter, or the optimizer has the shard as well.
    """
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners: dict[int, weakref.ref[Owner]] = {}
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            record = record_of(parameter)
            if record is None:
                continue
            if parameter is not record.leaf:
                if record.has_taken(parameter) and id(record.leaf) in present:
                    continue  # it gets no gradients: the other one does
                _require_own_leaf(optimizer, record)
                _move_state(optimizer, parameter, record)
                if id(record.shard) in present:
                    raise OptimizerError(_BOTH.format(kind=type(optimizer).__name__, name=record.name))
                group["params"][position] = record.shard
                present.add(id(record.shard))
            owner = record.owner
            if owner is not None:
                owners.setdefault(owner.id, weakref.ref(owner))
    return list(owners.values())


def _require_own_leaf(optimizer: Optimizer, record: ShardedParameter) -> None:
    if record.flat is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} was built from {record.name}, which is part of a flat parameter now; build "
            "the optimizer from the wrapped model's parameters(), or wrap with use_orig_params=True"
        )


def _move_state(optimizer: Optimizer, parameter: nn.Parameter, record: ShardedParameter) -> None:
    """What is kept for a shard is kept for the one that has taken its place (`load_state_dict(assign=True)`)."""
    if not optimizer.state.get(parameter):
        return
    if isinstance(parameter, DTensor):
        optimizer.state[record.shard] = optimizer.state.pop(parameter)
        return
    raise OptimizerError(
        f"{type(optimizer).__name__} holds state for {record.name} as it was before fully_shard replaced it; "
        "stepping it would train nothing. Build the optimizer after sharding, and load its state with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


_BOTH = (
    "{kind} holds {name} twice: as it was before fully_shard replaced it, and as the shard. A module outside every "
    "unit still shows the old one (tied weights?); call fully_shard on a module that contains both"
)

watcher = _Watcher()
