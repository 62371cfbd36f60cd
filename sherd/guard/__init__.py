"""Never hang: what is done so that no rank waits for ever for another one, and ranks that differ train together.

The engine loads this room when it seals a model whose ranks may differ. It calls it through one protocol, `Overseer` of
`sherd/engine/run/overseer.py`, with each collective that it starts, and with what may wait for other ranks.

    overseer_of      divergence.py: which of the two a mesh has
                       |
        +--------------+---------------+
    DivergenceChecker              Coordinator
    divergence="error"             divergence="join"
    checker.py                     coordinator.py     all ranks issue the same collectives, in an agreed order
      order_check.py                 for_others.py    what other ranks want of a unit, and this one does not
      likeness.py                    away.py          optimizer steps of ranks without a batch
      tree.py                        attempt.py       a step that all ranks make or skip (`sherd.step`)
        +--------------+---------------+
                       |
    ledger.py        what this rank has started, and whether it waits
    board.py         ranks that cannot go on tell each other where they stand; its thread serves the next two
    flight.py        when something fails, each rank writes what it has done to a file
    watchdog.py      on an accelerator, where the host does not wait: a queued collective that does not end
    bounded_store.py a store whose calls end, for all three

Decisions 30 and 31 say why. The comparison of a step's ways is `sherd/schedule/path.py`, the agreed order
`sherd/schedule/agreed.py`; both are pure.
"""

from sherd.guard.attempt import Attempt, Failure, GivenUp
from sherd.guard.coordinator import Coordinator
from sherd.guard.divergence import overseer_of

__all__ = ["Attempt", "Coordinator", "Failure", "GivenUp", "overseer_of"]
