"""How does a user say that several backwards make one step? `accumulate`, for both front ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sherd.engine.run.accumulation import Accumulation
from sherd.engine.run.seal import units_below
from sherd.errors import ModuleError, StateError
from sherd.policy import require_int


@contextmanager
def accumulate(model: nn.Module, num_backwards: int) -> Iterator[None]:
    """The next `num_backwards` backwards of `model` make one optimizer step; communicate no more than that needs.

        with sherd.accumulate(model, len(micro_batches)):
            for micro_batch in micro_batches:
                (loss_of(model, micro_batch) / len(micro_batches)).backward()
        optimizer.step()

    Backwards before the last reduce over the axes only over which gradients are sharded: with HSDP each reduces within
    a replica, and the last one over the replicas; with ZeRO-1 and DDP only the last one reduces at all
    (`Placements.gradient`). Parameters that are kept unsharded, or of which replicas own pieces, are brought up to date
    once; outside this context that is done at every forward, as somebody may have written them. Sums over replicas wait
    in the parameters' dtype, whatever the reduce dtype. Losses are not divided: that is the caller's choice.

    Args:
        model: a module on which `fully_shard` was called, or that holds such modules, or a wrapper.
        num_backwards: 1 or more.

    Raises:
        ModuleError: nothing below `model` is sharded.
        PolicyError: `num_backwards` below 1; `PolicyTypeError` if it is no int.
        StateError: within another such context; a further backward; on leaving, there were fewer. On leaving with any
            exception, what was not yet reduced is dropped.
    """
    require_int("accumulate(num_backwards={})", num_backwards, 1)
    units = units_below(model)
    if not units:
        raise ModuleError(f"accumulate: nothing below {type(model).__name__} is sharded; call fully_shard first")
    if any(unit.policy.accumulation is not None for unit in units):
        raise StateError(f"accumulate within accumulate of the same model, {units[0].class_name}; leave the outer one")
    before = [unit.policy for unit in units]
    counted = Accumulation(num_backwards)
    for unit in units:
        unit.change(accumulation=counted)
    try:
        yield
        if counted.fewest < num_backwards:
            raise StateError(
                f"accumulate(model, {num_backwards}) saw {counted.fewest} backwards of {units[0].class_name}, so "
                "gradients wait for a reduction that has not come; run as many as announced, of the outermost module"
            )
    except BaseException:
        # Half a step's sums would get into the next one: an optimizer's zero_grad does not see them.
        for unit in units:
            unit.backward.drop_unreduced()
        raise
    finally:
        for unit, policy in zip(units, before, strict=True):
            unit.change(
                accumulation=None,
                reduce_gradients=policy.reduce_gradients,
                all_reduce_gradients=policy.all_reduce_gradients,
            )
