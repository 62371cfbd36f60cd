"""The stages of a pipeline: the order in which each computes, and when. One forward, one backward in turn (1F1B):
PipeDream-Flush of Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sherd.tools.simulate.work import ALONE, Group


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: of the stage, of `num_stages`.
        sent: bytes that go from one stage to the next, and back.
        pair: a rank of a stage, and of the next one that which it sends to.
        begins: when each pass may begin, in seconds, in their `order`; None: at once.
    """

    number: int
    num_stages: int
    sent: int = 0
    pair: Group = ALONE
    begins: tuple[float, ...] | None = None

    def order(self, micro_batches: int) -> list[bool]:
        """Returns its passes: True for a forward, False for a backward."""
        ahead = min(self.num_stages - self.number - 1, micro_batches)
        return [True] * ahead + [True, False] * (micro_batches - ahead) + [False] * ahead


def begins(seconds: Sequence[tuple[float, float]], micro_batches: int, send: float) -> list[tuple[float, ...]]:
    """Returns of each stage when each of its passes may begin.

    A forward waits for that of the stage before, a backward for that of the stage behind, and both for what is sent.

    Args:
        seconds: of a forward and of a backward, for each stage.
        micro_batches: of a step.
        send: seconds of what is sent from one stage to the next.
    """
    stages = range(len(seconds))
    orders = [Stage(number, len(seconds)).order(micro_batches) for number in stages]
    ends: dict[tuple[int, bool, int], float] = {}  # by the stage, whether it is a forward, and the micro-batch
    found: list[list[float]] = [[] for _ in stages]
    free, done = [0.0] * len(seconds), [[0, 0] for _ in stages]
    while any(len(each) < len(order) for each, order in zip(found, orders, strict=True)):
        for stage in stages:
            while len(found[stage]) < len(orders[stage]):
                forward = orders[stage][len(found[stage])]
                number, other = done[stage][forward], stage - 1 if forward else stage + 1
                ready = ends.get((other, forward, number)) if other in stages else 0.0
                if ready is None:
                    break
                start = max(free[stage], ready + send if other in stages else 0.0)
                found[stage].append(start)
                free[stage] = ends[stage, forward, number] = start + seconds[stage][not forward]
                done[stage][forward] += 1
    return [tuple(each) for each in found]
