"""The choice of what is done about ranks that go different ways.

CommPolicy(divergence="error")    Guard          ranks compare where they leave the known path; all raise
CommPolicy(divergence="join")     Coordinator    ranks issue the same collectives, also those that want others
CommPolicy(divergence="trust")    none           nothing is compared
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_of
from sherd.comm.mesh import DataMesh
from sherd.engine.run.unit import Unit
from sherd.errors import PolicyError
from sherd.schedule.actions import Action, Await, FinishReduce, Gather, Reduce


class Overseer(Protocol):
    """Sees each collective of a unit before it is started."""

    def watch(self, unit: Unit) -> None:
        """Know `unit`, one of the mesh's."""

    def begin(self, unit: Unit) -> None:
        """A forward of `unit`, a root, begins."""

    def end_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has ended."""

    def abandon_backward(self, unit: Unit) -> None:
        """A backward of the model of `unit`, a root, has raised in its middle, and the program goes on."""

    def starts(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, a collective of `unit`, when all ranks do."""

    def waits(self, action: type[Action], unit: Unit, carry_out: Callable[[], None]) -> None:
        """Carry out `action`, which may wait for the other ranks."""


_overseers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], Overseer]] = (
    weakref.WeakKeyDictionary()
)
"""By group, policy and ranks: by the group of a mesh of one axis, else by the default one."""


def overseers_of(units: Sequence[Unit]) -> dict[int, Overseer]:
    """Returns who sees the collectives of `units`, those of one model, the root first: by the ids of those of which
    somebody does.

    Raises:
        PolicyError: some units are to be joined and others are not, or a unit has ranks that the root lacks.
        CommError: the process that has the store of the default group has died.
    """
    _require_one_policy(units)
    overseers: dict[int, Overseer] = {}
    # A rank that skips a unit of a smaller mesh has to hear of it, so joined units have one order, the root's ranks'.
    joins = units[0].mesh.comm.divergence == "join"
    for unit in units:
        overseer = _overseer_of(units[0].mesh if joins else unit.mesh)
        if overseer is not None:
            overseer.watch(unit)
            overseers[unit.id] = overseer
    return overseers


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


def _overseer_of(mesh: DataMesh) -> Overseer | None:
    policy, ranks = mesh.comm.divergence, _ranks_of(mesh)
    sends = not (mesh.comm.fake_all_gather or mesh.comm.fake_reduce)
    world = default_group()
    if len(ranks) == 1 or policy == "trust" or not sends or dist.get_backend(world) == "fake":
        return None
    parent = group_of(mesh.mesh, 0) if mesh.mesh.ndim == 1 else world
    known = _overseers.setdefault(parent, {})
    if (policy, ranks) not in known:
        from sherd.comm.board import board_of  # with what is read in time of need; one rank alone does without

        with named("the connection to the store, for ranks that differ,", world):
            board = board_of(world)
        if policy == "join":
            from sherd.engine.run.coordinator import Coordinator
            from sherd.engine.run.ledger import Ledger

            ledger = Ledger(f"{parent.group_name} {ranks} join", ranks, None if board is None else board.recorder)
            known[policy, ranks] = Coordinator(parent, ranks, mesh.device, ledger)
        elif board is not None:
            from sherd.engine.run.guard import Guard

            known[policy, ranks] = Guard(parent, ranks, mesh.device, board)
        else:
            return None  # a rank that alone takes another way could not say so
    return known[policy, ranks]


def overseen(
    overseer: Overseer | None, action: Action, unit: Unit, carry_out: Callable[[], None]
) -> Callable[[], None]:
    """Returns `carry_out`, the call that carries out `action` on `unit`, with `overseer` looking on if it may wait for
    other ranks."""
    kind = type(action)
    if overseer is None or kind not in (Gather, Reduce, Await, FinishReduce):
        return carry_out
    if kind in (Await, FinishReduce):
        return partial(overseer.waits, kind, unit, carry_out)
    is_alone = not unit.parameters or (kind is Gather and unit.mesh.num_shards == 1)
    return carry_out if is_alone else partial(overseer.starts, kind, unit, carry_out)
