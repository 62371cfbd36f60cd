"""The monitors of a model: objects that see each collective of its units before the start, so that no rank hangs.

The engine knows this protocol only. The implementations are plug-ins, `sherd/guard/` and `sherd/uneven/`, of which one
is loaded when a model is sealed whose ranks may differ.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Protocol

import torch.distributed as dist

from sherd.comm.failures import Groups, listen
from sherd.comm.groups import default_group, group_of, is_destroyed
from sherd.comm.mesh import DataMesh
from sherd.engine.run.unit import Unit, meshes
from sherd.errors import MeshError, PolicyError
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, GatherMore, Reduce

PLUG_INS = {"error": "sherd.guard", "join": "sherd.uneven"}
"""By `CommPolicy.divergence`: the package whose `make_monitor(parent, ranks, mesh)` makes the monitor of a mesh, or
returns None where there can be none."""


class CollectiveMonitor(Protocol):
    def watch(self, unit: Unit) -> None:
        """Add `unit`, one of the mesh's."""

    def begin(self, unit: Unit) -> None:
        """Note that a forward of `unit`, a root, begins."""

    def end_backward(self, unit: Unit) -> None:
        """Note that a backward of the model of `unit`, a root, has ended."""

    def abandon_backward(self, unit: Unit) -> None:
        """Note that a backward of the model of `unit`, a root, raised, and that the program goes on."""

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, when all ranks do."""

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks; a `GatherMore` is a part of what all have started."""

    def calls(self, what: str, purpose: str, is_rare: bool) -> AbstractContextManager[None]:
        """Returns a context for a collective of all ranks outside of units; see `sherd.comm.failures.announced`."""

    def agrees(self, what: str, terms: Sequence[str], units: Sequence[Unit]) -> None:
        """Return when all ranks make a call, `what` in words, with these `terms`, and replicas have `units` alike."""


_monitors: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], CollectiveMonitor]] = (
    weakref.WeakKeyDictionary()
)
"""By group, policy and ranks: by the group of a mesh of one axis, else by the default group."""
_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[int, ...], CollectiveMonitor]] = (
    weakref.WeakKeyDictionary()
)
"""By the group of each axis of its mesh: the monitor that was asked for last, and its ranks."""
_asked_for: weakref.WeakKeyDictionary[CollectiveMonitor, int] = weakref.WeakKeyDictionary()
"""When each monitor was asked for the last time, by a number that grows."""
_numbers = itertools.count()


def agree_on_call(units: Sequence[Unit], what: str, terms: Sequence[str], with_values: bool = False) -> None:
    """Return when all ranks are about to make a call outside of forward and backward that concerns `units`.

    Args:
        units: the units.
        what: what the rank does, in words.
        terms: the arguments, in words.
        with_values: compare the values of replicas, too.

    Raises:
        CommError: some ranks do something else, or with other terms; or a rank has died.
    """
    by_monitor: dict[CollectiveMonitor, list[Unit]] = {}
    for unit in units:
        if (monitor := _monitor_of(unit.mesh)) is not None:
            by_monitor.setdefault(monitor, []).append(unit)
    for monitor, of_mesh in by_monitor.items():
        monitor.agrees(what, terms, of_mesh if with_values else ())


def monitors_of(units: Sequence[Unit]) -> dict[int, CollectiveMonitor]:
    """Returns the monitors of `units`, all of one model, the root first. By the id of each unit that has one.

    Raises:
        PolicyError: some units are to be joined and others are not, or a unit has ranks that the root lacks.
        CommError: the process that has the store of the default group has died.
    """
    _require_one_policy(units)
    monitors: dict[int, CollectiveMonitor] = {}
    # Joined units have one order, that of the root's ranks: a rank that skips a unit of a smaller mesh must hear of it.
    joins = units[0].mesh.comm.divergence == "join"
    for unit in units:
        monitor = _monitor_of(units[0].mesh if joins else unit.mesh)
        if monitor is not None:
            monitor.watch(unit)
            monitors[unit.id] = monitor
    return monitors


def _announced(groups: Groups, what: str, purpose: str, is_rare: bool) -> AbstractContextManager[None]:
    own = [group or default_group() for group in groups]
    of_groups = [dist.get_process_group_ranks(group) for group in own]
    monitor = _monitor_over(own, of_groups) if math.prod(map(len, of_groups)) > 1 else None
    return nullcontext() if monitor is None else monitor.calls(what, purpose, is_rare)


listen(_announced)


def _require_one_policy(units: Sequence[Unit]) -> None:
    root = units[0]
    for unit in units:
        chosen = {root.mesh.comm.divergence, unit.mesh.comm.divergence}
        if "join" in chosen and len(chosen) > 1:
            raise PolicyError(
                f"unit {unit.name} has CommPolicy(divergence={unit.mesh.comm.divergence!r}), its root {root.name} "
                f"{root.mesh.comm.divergence!r}: give all units of a model divergence='join', or none"
            )
        if "join" in chosen and not set(_ranks_of(unit.mesh)) <= set(_ranks_of(root.mesh)):
            raise PolicyError(
                f"unit {unit.name} is sharded over ranks that its root {root.name} is not sharded over; under "
                "divergence='join' the root's mesh must hold all ranks of its units"
            )


def _ranks_of(mesh: DataMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.mesh.flatten().tolist())


def _monitor_of(mesh: DataMesh) -> CollectiveMonitor | None:
    """Returns the monitor of the ranks of `mesh`; None for a single rank, and where nothing is compared."""
    comm, ranks = mesh.comm, _ranks_of(mesh)
    sends = not (comm.fake_all_gather or comm.fake_reduce)
    if len(ranks) == 1 or comm.divergence == "trust" or not sends or dist.get_backend(default_group()) == "fake":
        return None
    parent = group_of(mesh.mesh, 0) if mesh.mesh.ndim == 1 else default_group()
    known, key = _monitors.setdefault(parent, {}), (comm.divergence, ranks)
    if key not in known:
        # By name, and only here: a single rank does without the plug-ins.
        monitor: CollectiveMonitor | None = import_module(PLUG_INS[comm.divergence]).make_monitor(parent, ranks, mesh)
        if monitor is None:
            return None
        known[key] = monitor
    _asked_for[known[key]] = next(_numbers)
    for axis in range(mesh.mesh.ndim):
        _of_groups[group_of(mesh.mesh, axis)] = ranks, known[key]
    return known[key]


def _monitor_over(groups: Sequence[dist.ProcessGroup], of_groups: Sequence[Sequence[int]]) -> CollectiveMonitor | None:
    """Returns the monitor for a collective over `groups`, which are axes of one mesh with these ranks.

    It is that of one of the groups, else that of a mesh which has one, else the one of the same ranks that was asked
    for last: models are sealed in one order on all ranks. Monitors live as long as their groups. Meshes go with their
    models, on each rank at another moment, so they are asked only before their first model is sealed.
    """
    together, num_ranks = {rank for ranks in of_groups for rank in ranks}, math.prod(map(len, of_groups))

    def fits(ranks: tuple[int, ...]) -> bool:
        return len(ranks) == num_ranks and together <= {*ranks}

    for ranks, monitor in (_of_groups[group] for group in groups if group in _of_groups):
        if fits(ranks):
            return monitor
    known = [
        (_asked_for[monitor], monitor)
        for parent, monitors in list(_monitors.items())
        for (_, ranks), monitor in monitors.items()
        if fits(ranks) and not is_destroyed(parent)
    ]
    _, latest = max(known, key=itemgetter(0), default=(0, None))
    for mesh in list(meshes.values()):
        if fits(_ranks_of(mesh)) and (latest is None or {mesh.shard_group, mesh.replicate_group} & {*groups}):
            with contextlib.suppress(MeshError):  # of a model that is gone, whose groups are destroyed
                return _monitor_of(mesh)
    return latest


def monitored(
    monitor: CollectiveMonitor | None, action: Action, unit: Unit, carry_out: Callable[[], None]
) -> Callable[[], None]:
    """Returns `carry_out`, the call that carries out `action` on `unit`, under `monitor` if other ranks take part."""
    action_type = type(action)
    if monitor is None or action_type not in (Gather, GatherMore, Reduce, Await, FinishReduce):
        return carry_out
    if action_type in (GatherMore, Await, FinishReduce):
        return partial(monitor.waits, action_type, unit, carry_out)
    is_alone = not unit.parameters or (action_type is Gather and not unit.gathers)
    return carry_out if is_alone else partial(monitor.starts, action_type, unit, carry_out)
