"""Steps of optimizers whose state, or whose masters, rest elsewhere: a unit at a time (`chunks.py`).

An element-wise optimizer steps spans of the shard buffers, as if it were given to `flatten_optimizer`. `Muon` steps the
matrices of one unit after those of another. Any other optimizer has all of its state where it steps meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer

from sherd.comm.streams import Handoff
from sherd.engine import Group
from sherd.optim.chunks import Chunk, step_chunks
from sherd.optim.flat import Stepper, step_spans, with_own_counts
from sherd.optim.matrix import MatrixOptimizer
from sherd.tensor.local_step import params_of
from sherd.tensor.optimizers import is_elementwise_class

Step = Callable[..., object]

_steppers: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Optimizer, Handoff] = weakref.WeakKeyDictionary()
"""The last copy of each other optimizer's state to where it rests."""
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _wait_for_copies(optimizer: Optimizer) -> None:
    if optimizer in _copies:
        _copies[optimizer].wait_on_host()


def step_in_chunks(optimizer: Optimizer, groups: list[Group], step: Step) -> Step:
    """Returns how `optimizer` steps, given the `groups` of which something comes for a step, and how it steps else."""
    if is_elementwise_class(type(optimizer)):
        if optimizer not in _steppers:
            stepper = _steppers[optimizer] = Stepper(type(optimizer))
            optimizer.register_state_dict_pre_hook(lambda _: stepper.wait_for_copies())
            optimizer.register_state_dict_post_hook(lambda _, state_dict: with_own_counts(state_dict))
        return partial(step_spans, _steppers[optimizer], optimizer)
    if optimizer not in _known:
        _known.add(optimizer)
        optimizer.register_state_dict_pre_hook(_wait_for_copies)
    return partial(_step_shards, optimizer, groups, step)


def _step_shards(optimizer: Optimizer, groups: list[Group], step: Step, *args: object, **kwargs: object) -> object:
    """Step the shards themselves. Returns what the last step returns."""
    lists = [group["params"] for group in optimizer.param_groups]
    by_unit: dict[int, list[Group]] = {}
    takes_parts = isinstance(optimizer, (MatrixOptimizer, *MATRIX_CLASSES)) and not (args or kwargs)
    for group in groups:
        by_unit.setdefault(id(group.parameters[0].owner) if takes_parts else 0, []).append(group)
    brought = {id(each.parameter) for group in groups for each in group.optimizer_params}
    brought |= {id(record.shard) for group in groups for record in group.parameters}
    chunks = []
    for own in by_unit.values():
        ids = {id(each.parameter) for group in own for each in group.optimizer_params}
        ids |= {id(record.shard) for group in own for record in group.parameters}
        rest = [] if takes_parts else [id(each) for each in params_of(optimizer) if id(each) not in brought]
        ids.update(rest)
        chunks.append(Chunk([[each for each in of if id(each) in ids] for of in lists], own, are_shards=True))
    if takes_parts and any(id(each) not in brought for each in params_of(optimizer)):
        chunks.append(Chunk([[each for each in of if id(each) not in brought] for of in lists]))
    results = []

    def step_one(chunk: Chunk) -> None:
        with chunk.lent_to(optimizer):
            results.append(step(*args, **kwargs))

    _copies[optimizer] = step_chunks(chunks, optimizer.state, step_one)
    return results[-1]


MATRIX_CLASSES = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
