"""The functions that carry out the schedule's actions on a unit, on one group after the other.

They look at the unit's groups and policy when they are called, so a call that is bound once (`tape.py`) stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.moves.weights import IS_TRAINED, STAND
from sherd.engine.run.unit import Unit, put_first
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import notice_replaced
from sherd.policy import UnitPolicy
from sherd.schedule.actions import Action, Await, Discard, FinishReduce, Free, FreeGroup, Gather, Reduce, Shrink
from sherd.schedule.state import Live


def gather(unit: Unit, in_full_precision: bool | None = None, but: Collection[int] = ()) -> None:
    """Start the all-gathers of all groups `but` those, in the precision that the unit computes in now if none is
    given."""
    user = unit.policy.all_gather
    for number, weights in enumerate(unit.weights):
        if number in but or weights.live is Live.UNSHARDED:
            continue  # other groups of the unit were freed alone
        precisely = in_full_precision
        if precisely is None:
            precisely = unit.precision.full_precision_in_eval and unit.in_full_precision
        if unit.policy.notices_replaced and notice_replaced(weights.group.parameters):
            watcher.sharded_again()
        mesh = weights.group.mesh
        transport = mesh.gather_transport if user is None else UsersCollectives(user, mesh.shard_group)
        weights.gather(transport, precisely)


def wait(unit: Unit) -> None:
    """Have unsharded parameters from here on."""
    for weights in unit.weights:
        if weights.live is not Live.UNSHARDED:
            weights.wait()
    for hooks, key, _ in unit.touch_hooks:
        if key in hooks:
            del hooks[key]


def shrink(unit: Unit) -> None:
    """Have shards from here on, keeping a part for the smaller mesh."""
    size = unit.policy.reshard_after_forward
    assert isinstance(size, int), "only an int asks for a smaller mesh"
    for weights in unit.weights:
        weights.shrink(size)
    put_first(unit.touch_hooks)


def outdated(units: Sequence[Unit]) -> list[Unit]:
    """Returns those of `units` that are kept as of other shards than they have now, which were written in place since,
    or of which one form was told to be trained, or not to be. One call for all units, as a step may keep each."""
    found = []
    for unit in units:
        for weights in unit.weights:
            made = weights.made
            if weights.live is Live.SHARDED or made is None:
                continue
            now = list(map(STAND, weights.group.shard_memory.versioned))
            is_told = weights.live is Live.UNSHARDED and made.trained != list(map(IS_TRAINED, made.parameters))
            if is_told or now != weights.as_of:
                found.append(unit)
    return found


def reduce(unit: Unit, policy: UnitPolicy | None = None, but: Collection[int] = ()) -> None:
    """Start the reductions of what all groups `but` those have collected, by the unit's policy if none is given."""
    if policy is None:
        policy = unit.policy
    user, apart = policy.reduce_scatter, policy.separate_reduce_group
    # All rows are taken before the first reduction is queued, or compute would wait for that to take the second's.
    for gradients in unit.gradients if len(unit.gradients) > 1 else ():
        gradients.collect()
    for number, gradients in enumerate(unit.gradients):
        if number in but:
            continue
        mesh = gradients.group.mesh
        if user is not None:
            transport: Transport = UsersCollectives(user, mesh.reduction_group() if apart else mesh.shard_group)
        else:
            transport = mesh.separate_reduce_transport if apart else mesh.reduce_transport
        gradients.reduce(policy, transport)


def finish_reduce(unit: Unit) -> None:
    """Have gradients on the shards from here on."""
    for gradients in unit.gradients:
        gradients.finish_reduce(unit.policy)
    if unit.policy.when_reduced is not None:
        unit.land_gradients()
        unit.policy.when_reduced()


def discard(unit: Unit) -> None:
    """Drop gradients that have not reached the shards."""
    for weights in unit.weights:
        weights.drop_gradients()
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


def bound(action: Action, unit: Unit) -> Callable[[], None]:
    """Returns the call that carries out `action` on `unit`."""
    if isinstance(action, FreeGroup):
        group = action.group
        return lambda: unit.weights[group].free()
    return partial(DO[type(action)], unit)
