"""`step_in_backward`: an optimizer that steps each unit within backward, as soon as the unit's gradients are reduced.

    backward of    block 3        block 2        block 1        block 0
    reductions                    block 3        block 2        block 1        block 0
    steps                                        block 3        block 2        block 1        block 0

Gradients of all parameters never exist at once, and with CPU offload the host steps one unit while the device goes on
with the next units. Fused steps within backward are known from LOMO (Lv et al. 2023) and from torch's
`register_post_accumulate_grad_hook`; here all parameters of a unit are stepped together, in few calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.optim import LBFGS, Optimizer

from sherd._torch import at_end_of_backward
from sherd.engine import Runtime, Unit
from sherd.errors import ModuleError, OptimizerError, PolicyError, PolicyTypeError, StateError
from sherd.optim import FlatStep, params_replaced
from sherd.optim.under_way import StepsUnderWay
from sherd.steps_on_thread import is_on_thread


class StepsInBackward:
    """The steps of `step_in_backward`. `remove()` ends them."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer) -> None:
        # Of ranks that differ, each may bring its gradients of a unit in a reduction of its own.
        units = [unit for unit in units if unit.mesh.comm.divergence != "join"]
        self._optimizer = optimizer
        self._stepped: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        # Backward holds them by its callback, so that they go with a backward that raises.
        self._under_way: Callable[[], StepsUnderWay | None] = lambda: None
        self._units = [weakref.ref(unit) for unit in units]
        for unit in units:
            unit.change(when_reduced=partial(self._step, weakref.ref(unit)))

    def remove(self) -> None:
        """Leave all steps to `optimizer.step()` again."""
        for unit in filter(None, (ref() for ref in self._units)):
            unit.change(when_reduced=None)

    def _step(self, ref: weakref.ref[Unit]) -> None:
        """Step the parameters of the unit that have gradients, and drop the gradients."""
        unit = ref()
        runtime = None if unit is None else Runtime.over(unit)
        if unit is None or runtime is None:
            return
        # Backward would gather values that it has not read yet again, from shards that are already stepped.
        may = runtime.is_in_last_backward and all(weights.is_unread for weights in unit.weights)
        # No stream orders the step after copies to host memory.
        unit.land_gradients(ahead=may and is_on_thread(self._optimizer))
        if not may:
            return
        parameters = (each for record in unit.parameters for each in (record.shard, record.optimizer_param))
        with_gradient = {id(each) for each in parameters if each.grad is not None}
        if not with_gradient:
            return
        if self._stepped.get(unit) == runtime.num_backwards:
            raise StateError(
                f"gradients of unit {unit.name} came a second time in one backward, when step_in_backward had stepped "
                "it already; use non-reentrant activation checkpointing, or leave the steps to optimizer.step()"
            )
        self._stepped[unit] = runtime.num_backwards
        steps = self._under_way() or StepsUnderWay()
        is_first, groups = not steps, self._optimizer.param_groups
        own = [[each for each in group["params"] if id(each) in with_gradient] for group in groups]
        with steps.beginning(), params_replaced(self._optimizer, own):
            self._optimizer.step()
            self._optimizer.zero_grad()
        if is_first and steps:
            at_end_of_backward(steps.finish)
            self._under_way = weakref.ref(steps)


def step_in_backward(model: nn.Module, optimizer: Optimizer) -> StepsInBackward:
    """Have `optimizer` step each unit of `model` within backward, as soon as the unit's gradients are reduced.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sherd.step_in_backward(model, optimizer)
        for batch in batches:
            loss_of(model, batch).backward()   # steps the units, and drops their gradients
            optimizer.step()                   # steps the rest: parameters outside of units
            optimizer.zero_grad()

    `sherd.Muon` and `MatrixOptimizer` wait late: the communication for a unit's matrices overlaps with the backward of
    the units before it, and the updates are complete when backward ends. Their hooks on steps are called before that.

    The training loop, its schedulers, checkpoints and results stay the same. Of several backwards before a step, the
    last one steps, if `sherd.accumulate`, `no_sync` or `set_is_last_backward(False)` announces the others. A unit that
    backward may read again, through `weight.detach()` or a tensor subclass with its own all-gather, is left to
    `optimizer.step()`; so are units with `CommPolicy(divergence="join")`, of which ranks may bring gradients twice.

    Between backward and step there are no gradients, so leave out whatever needs all of them: clipping by the norm of
    all gradients and a gradient scaler, of which `clip_grad_norm_` and `ShardedGradScaler` raise; optimizers that join
    all parameters (LBFGS, D-Adaptation); and pipeline schedules, which divide gradients.

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper.
        optimizer: an optimizer of torch, or of your own, that treats each parameter by itself; its hooks on steps are
            called for each unit.

    Returns:
        An object whose `remove()` ends this.

    Raises:
        ModuleError: nothing below `model` is sharded.
        OptimizerError: the optimizer joins all parameters, or was given to `flatten_optimizer`.
        PolicyError: a unit's `CommPolicy(error_limit=)` raises, which would be after the step.
        PolicyTypeError: `optimizer` is no optimizer of torch.
        StateError: in backward, if the gradients of a unit come twice (reentrant checkpointing of two calls).
    """
    if not isinstance(optimizer, Optimizer):
        raise PolicyTypeError(f"step_in_backward expects a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if isinstance(optimizer, LBFGS):
        raise OptimizerError("step_in_backward: LBFGS joins all parameters in one line; leave it to optimizer.step()")
    if isinstance(optimizer, FlatStep):
        raise OptimizerError(
            "step_in_backward: this optimizer was given to flatten_optimizer, which steps many units at once; leave "
            "one of the two out"
        )
    units = Unit.below(model)
    if not units:
        raise ModuleError(f"step_in_backward: nothing below {type(model).__name__} is sharded; call fully_shard first")
    for unit in units:
        if unit.mesh.comm.error_limit is not None and unit.mesh.comm.above_limit == "raise":
            raise PolicyError(
                f"step_in_backward: unit {unit.name} has CommPolicy(error_limit=), and ranks compare errors when "
                "backward ends, after its steps; take above_limit='unencoded', or leave error_limit out"
            )
    return StepsInBackward(units, optimizer)
