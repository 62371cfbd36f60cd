"""The functions that carry out the schedule's actions on a unit, on one group after the other."""

from __future__ import annotations

from collections.abc import Callable

from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.run.unit import Unit
from sherd.schedule.actions import Action, Await, Discard, FinishReduce, Free, Gather, Reduce, Shrink
from sherd.schedule.state import Live


def gather(unit: Unit) -> None:
    """Start the all-gathers."""
    user = unit.policy.all_gather
    for weights in unit.weights:
        if weights.live is Live.UNSHARDED:
            continue  # other groups of the unit were freed alone
        in_full_precision = unit.in_full_precision
        unit.notice_replaced(weights.group.parameters)
        mesh = weights.group.mesh
        transport = mesh.gather_transport if user is None else UsersCollectives(user, mesh.shard_group)
        weights.gather(transport, in_full_precision)


def wait(unit: Unit) -> None:
    """Have unsharded parameters from here on."""
    for weights in unit.weights:
        if weights.live is not Live.UNSHARDED:
            weights.wait()
    for hooks, key, _ in unit.touch_hooks:
        hooks.pop(key, None)


def shrink(unit: Unit) -> None:
    """Have shards from here on, keeping a part for the smaller mesh."""
    size = unit.policy.reshard_after_forward
    assert isinstance(size, int), "only an int asks for a smaller mesh"
    for weights in unit.weights:
        weights.shrink(size)
    notice_touches(unit)


def notice_touches(unit: Unit) -> None:
    """Have calls of modules inside of the unit noticed, as when it is freed.

    One that gathers for them does so also where it rests unsharded: it is kept for the backward of such a call then,
    and renewed if an optimizer has stepped.
    """
    for hooks, key, hook in unit.touch_hooks:
        hooks[key] = hook
        hooks.move_to_end(key, last=False)


def reduce(unit: Unit) -> None:
    """Start the reductions of what has been collected."""
    user, apart = unit.policy.reduce_scatter, unit.policy.separate_reduce_group
    # All rows are taken before the first reduction is queued, or compute would wait for that to take the second's.
    for gradients in unit.gradients if len(unit.gradients) > 1 else ():
        gradients.collect()
    for gradients in unit.gradients:
        mesh = gradients.group.mesh
        if user is not None:
            transport: Transport = UsersCollectives(user, mesh.reduction_group() if apart else mesh.shard_group)
        else:
            transport = mesh.separate_reduce_transport if apart else mesh.reduce_transport
        gradients.reduce(unit.policy, transport)


def finish_reduce(unit: Unit) -> None:
    """Have gradients on the shards from here on."""
    for gradients in unit.gradients:
        gradients.finish_reduce(unit.policy)
    if unit.policy.when_reduced is not None:
        unit.land_gradients()
        unit.policy.when_reduced()


def discard(unit: Unit) -> None:
    """Drop gradients that have not reached the shards."""
    for gradients in unit.gradients:
        gradients.discard()


DO: dict[type[Action], Callable[[Unit], None]] = {
    Gather: gather,
    Await: wait,
    Free: Unit.free,
    Shrink: shrink,
    Reduce: reduce,
    FinishReduce: finish_reduce,
    Discard: discard,
}
"""By kind of action: the function that carries it out on a whole unit."""
