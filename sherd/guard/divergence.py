"""The choice of what is done about ranks that go different ways.

CommPolicy(divergence="error")    DivergenceChecker    ranks compare where they leave the known path; all raise
CommPolicy(divergence="join")     Coordinator          ranks issue the same collectives, also those that want others
CommPolicy(divergence="trust")    none                 nothing is compared, and the engine does not ask here
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_of
from sherd.comm.mesh import DataMesh
from sherd.guard.board import board_of
from sherd.guard.checker import DivergenceChecker
from sherd.guard.coordinator import Coordinator
from sherd.guard.ledger import Ledger

_overseers: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], DivergenceChecker | Coordinator]
] = weakref.WeakKeyDictionary()
"""By group, policy and ranks: by the group of a mesh of one axis, else by the default one."""


def overseer_of(mesh: DataMesh, ranks: tuple[int, ...]) -> DivergenceChecker | Coordinator | None:
    """Returns who sees the collectives of units on `mesh`, which has these `ranks`. None if ranks are to be compared,
    and have no store over which one that alone takes another way could say so.

    Raises:
        CommError: the process that has the store of the default group has died.
    """
    policy, world = mesh.comm.divergence, default_group()
    parent = group_of(mesh.mesh, 0) if mesh.mesh.ndim == 1 else world
    known = _overseers.setdefault(parent, {})
    if (policy, ranks) not in known:
        with named("the connection to the store, for ranks that differ,", world):
            board = board_of(world)
        if policy == "join":
            ledger = Ledger(f"{parent.group_name} {ranks} join", ranks, None if board is None else board.recorder)
            known[policy, ranks] = Coordinator(parent, ranks, mesh.device, ledger)
        elif board is not None:
            known[policy, ranks] = DivergenceChecker(parent, ranks, mesh.device, board)
        else:
            return None
    return known[policy, ranks]
