"""Steps of optimizers whose state, or whose masters, rest elsewhere (`chunks.py`).

An element-wise optimizer steps parts of the shard buffers, as if it were given to `flatten_optimizer`. `Muon`, and any
other optimizer, has all of its state where it steps meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from torch.optim import LBFGS, Optimizer

from sherd.engine import Group, watcher
from sherd.errors import OptimizerError
from sherd.optim.chunks import Lists, Shards, States, step_chunks
from sherd.optim.flat import Stepper, step_spans, with_own_counts
from sherd.tensor.local_step import params_replaced
from sherd.tensor.optimizers import is_elementwise_class

Step = Callable[..., object]

_steppers: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
_stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those that have all of their state, and the masters, where they step."""


def step_in_chunks(optimizer: Optimizer, groups: list[Group], step: Step) -> Step:
    """Returns how `optimizer` steps, given the `groups` of which something comes for a step, and how it steps else.

    Raises:
        OptimizerError: LBFGS, of parameters with masters.
    """
    if optimizer in _stepping:  # the step of a subclass calls that of torch's class
        return step
    if is_elementwise_class(type(optimizer)):
        if optimizer not in _steppers:
            _steppers[optimizer] = Stepper(type(optimizer))
            optimizer.register_state_dict_post_hook(lambda _, state_dict: with_own_counts(state_dict))
        return partial(step_spans, _steppers[optimizer], optimizer)
    if isinstance(optimizer, LBFGS) and (masters := [group.name for group in groups if group.masters is not None]):
        raise OptimizerError(
            f"LBFGS joins all parameters in one line, and {masters[0]} has masters in parts: leave masters out, or "
            "keep the parameters in float32"
        )
    return partial(_step_shards, optimizer, groups, step)


def _step_shards(optimizer: Optimizer, groups: list[Group], step: Step, *args: object, **kwargs: object) -> object:
    """Step the shards themselves. Returns what the step returns."""
    # All at once: products of matrices by the unit are rounded otherwise than those of all matrices of a shape.
    chunk = Shards([group["params"] for group in optimizer.param_groups], optimizer.state, groups)
    results = []
    args = tuple(chunk.around_closure(each) if callable(each) else each for each in args)
    kwargs = {key: chunk.around_closure(each) if callable(each) else each for key, each in kwargs.items()}

    def run(lists: Lists, state: States) -> None:
        _stepping.add(optimizer)
        try:
            with params_replaced(optimizer, lists, state):
                results.append(step(*args, **kwargs))
        finally:
            _stepping.remove(optimizer)

    step_chunks(optimizer, [chunk], groups, run, 0 if optimizer.state else watcher.num_moments(optimizer))
    return results[0]
