"""Never hang: no rank waits for ever for another one, and ranks that differ can train together.

The engine loads this package when it seals a model whose ranks may differ. It calls it through one protocol,
`CollectiveMonitor` of `sherd/engine/run/monitor.py`, with each collective that it starts, and with each wait for other
ranks.

    monitor_of      here: which of the two a mesh has
                       |
        +--------------+---------------+
    DivergenceChecker              Coordinator
    divergence="error"             divergence="join"
    checker.py                     coordinator.py     all ranks issue the same collectives, in an agreed order
    ranks compare where they       attempt.py         a step that all ranks make or skip (`sherd.step`)
    leave the known path; all raise
        +--------------+---------------+
                       |
    deeds.py         what a rank does between two collectives: steps, clips, loads
    order_check.py   the words for a collective, and the comparison of ranks
    flight.py        the log of collectives; when something fails, each rank writes its log to a file
    board.py         ranks that cannot go on tell each other where they stand; its thread serves recorder and watchdog
    watchdog.py      on an accelerator, where the host does not wait: a queued collective that does not end
    bounded_store.py a store whose calls end

Under `divergence="trust"` nothing is compared, and the engine does not load this package. Decisions 30 and 31 say why.
`sherd/schedule/path.py` compares the paths of steps, `sherd/schedule/agreed.py` has the agreed order; both are pure.
"""

import itertools
import weakref

import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.groups import default_group, group_of, is_destroyed
from sherd.comm.mesh import DataMesh
from sherd.guard.attempt import Attempt, Failure, StepAborted
from sherd.guard.board import board_of
from sherd.guard.checker import DivergenceChecker
from sherd.guard.coordinator import Coordinator
from sherd.guard.flight import CollectiveLog

__all__ = ["Attempt", "Coordinator", "Failure", "StepAborted", "monitor_of"]

_monitors: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], DivergenceChecker | Coordinator]
] = weakref.WeakKeyDictionary()
"""By group, policy and ranks: by the group of a mesh of one axis, else by the default group."""


_asked_for: weakref.WeakKeyDictionary[DivergenceChecker | Coordinator, int] = weakref.WeakKeyDictionary()
"""When each monitor was asked for the last time, by a number that grows."""
_numbers = itertools.count()


def known_monitor(num_ranks: int, together: set[int]) -> DivergenceChecker | Coordinator | None:
    """Returns the monitor of `num_ranks` ranks, all of `together` among them, that was asked for last, if there is one.

    Models are sealed in one order on all ranks, so that they take the same one.
    """
    found = [
        monitor
        for parent, monitors in list(_monitors.items())
        for (_, ranks), monitor in monitors.items()
        if len(ranks) == num_ranks and together <= {*ranks} and not is_destroyed(parent)
    ]
    return max(found, key=_asked_for.__getitem__, default=None)


def monitor_of(mesh: DataMesh, ranks: tuple[int, ...]) -> DivergenceChecker | Coordinator | None:
    """Returns the monitor of the collectives of units on `mesh`, which has these `ranks`.

    It is None if ranks are to be compared, and their store connects no processes: a rank that leaves the path alone
    could not say so.

    Raises:
        CommError: the process that has the store of the default group has died.
    """
    policy, world = mesh.comm.divergence, default_group()
    parent = group_of(mesh.mesh, 0) if mesh.mesh.ndim == 1 else world
    known = _monitors.setdefault(parent, {})
    if (policy, ranks) not in known:
        with named("the connection to the store, for ranks that differ,", world):
            board = board_of(world)
        if policy == "join":
            log = CollectiveLog(f"{parent.group_name} {ranks} join", ranks, None if board is None else board.recorder)
            known[policy, ranks] = Coordinator(parent, ranks, mesh.device, log)
        elif board is not None:
            known[policy, ranks] = DivergenceChecker(parent, ranks, mesh.device, board)
        else:
            return None
    _asked_for[known[policy, ranks]] = next(_numbers)
    return known[policy, ranks]
