"""Never hang: no rank waits forever for another one.

The engine loads this package when it seals a model whose ranks may differ. It calls it through one protocol,
`CollectiveMonitor` of `sherd/engine/run/monitor.py`, with each collective that it starts, and with each wait for other
ranks.

    checker.py       the monitor of `divergence="error"`: ranks compare where they leave the known path; all raise
    deeds.py         what a rank does between two collectives: steps, clips, loads
    order_check.py   the words for a collective, and the comparison of ranks
    flight.py        the log of collectives; when something fails, each rank writes its log to a file
    board.py         ranks that cannot go on tell each other where they stand; its thread serves recorder and watchdog
    watchdog.py      on an accelerator, where the host does not wait: a queued collective that does not end
    bounded_store.py a store whose calls end

Under `divergence="trust"` nothing is compared, and the engine does not load this package. Decisions 30 and 31 say why.
`sherd/schedule/path.py` compares the paths of steps, and is pure. Ranks that differ train together in `sherd/uneven/`,
which has the other monitor.
"""

import torch.distributed as dist

from sherd.comm.failures import named
from sherd.comm.groups import default_group
from sherd.comm.mesh import DataMesh
from sherd.guard.board import Board, board_of
from sherd.guard.checker import DivergenceChecker


def own_board() -> Board | None:
    """Returns this rank's board over the default group; None if its store connects no processes.

    Raises:
        CommError: the process that has the store has died.
    """
    world = default_group()
    with named("the connection to the store, for ranks that differ,", world):
        return board_of(world)


def make_monitor(parent: dist.ProcessGroup, ranks: tuple[int, ...], mesh: DataMesh) -> DivergenceChecker | None:
    """Returns the monitor of units on `mesh`, which has these `ranks`; None if there is no board.

    A rank that leaves the path alone could not report it.
    """
    board = own_board()
    return None if board is None else DivergenceChecker(parent, ranks, mesh.device, board)
