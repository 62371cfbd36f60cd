"""Ranks that differ train together: `sherd.join`, `sherd.step`, and models with `divergence="join"`.

    joining.py       a rank without a batch serves the others
    guarded_step.py  a step that all ranks make or skip
        |
    coordinator.py   the monitor of such models: all ranks issue the same collectives, in the order of agreed.py
    attempt.py       one rank's part in the votes on a step; snapshot.py restores what it wrote

The engine loads it where a model is sealed whose ranks are to be joined (`sherd/engine/run/monitor.py`).
Decision 31 says why.
"""

import torch.distributed as dist

from sherd.comm.mesh import DataMesh
from sherd.guard import own_board
from sherd.guard.flight import CollectiveLog
from sherd.uneven.coordinator import Coordinator


def make_monitor(parent: dist.ProcessGroup, ranks: tuple[int, ...], mesh: DataMesh) -> Coordinator:
    """Returns the monitor of units on `mesh`, which has these `ranks`."""
    board = own_board()
    log = CollectiveLog(f"{parent.group_name} {ranks} join", ranks, None if board is None else board.recorder)
    return Coordinator(parent, ranks, mesh.device, log)
