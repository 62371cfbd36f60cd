"""The clock: lanes of work that run beside one another, as in `sherd/comm/streams.py`.

The host queues work, one thing after the other. On a device with streams, compute and each kind of collective have a
lane of their own, and queued work runs as soon as its inputs are there. Without streams the host itself computes, and a
collective takes its time while compute waits for it.
"""

from __future__ import annotations

from sherd.tools.simulate.costs import ClusterCosts
from sherd.tools.simulate.timeline import Lane, LaneSpan

SHARING = (Lane.GATHER, Lane.REDUCE, Lane.ALL_REDUCE, Lane.MATRICES)
"""The lanes whose work takes processors of the device. Copies to the host have engines of their own."""


class Clock:
    """Times of one rank's lanes, in seconds.

    Attributes:
        spans: the work, in the order of queueing.
        exposed: seconds for which compute waited, by lane.
    """

    def __init__(self, costs: ClusterCosts) -> None:
        self._costs = costs
        self._free = dict.fromkeys(Lane, 0.0)
        self._follows = dict.fromkeys(Lane, 0.0)
        self._host = 0.0
        self._met = 0.0
        """The time when the ranks last waited for one another, without streams."""
        self._busy: list[tuple[float, float]] = []
        """The start and end of each collective that takes a part of the device from compute."""
        self.spans: list[LaneSpan] = []
        self.exposed = dict.fromkeys(Lane, 0.0)

    @property
    def now(self) -> float:
        """The time when compute is done with all queued work."""
        return self._free[Lane.COMPUTE]

    def compute(self, name: str, unit: int, seconds: float, num_queued: int = 1) -> None:
        """Queue operations on compute that take `seconds` together.

        The device begins once the first operation is queued, and ends after the last one is. Work of the same name and
        unit without a gap is one span.
        """
        start = max(self.now, self._host + min(1, num_queued) * self._costs.host)
        self._host += num_queued * self._costs.host
        end = self._free[Lane.COMPUTE] = max(self._end_beside_collectives(start, seconds), self._host)
        last = self.spans[-1] if self.spans else None
        if last and (last.lane, last.name, last.unit, last.end) == (Lane.COMPUTE, name, unit, start):
            self.spans[-1] = LaneSpan(Lane.COMPUTE, name, unit, last.start, end)
        elif end > start:
            self.spans.append(LaneSpan(Lane.COMPUTE, name, unit, start, end))

    def _end_beside_collectives(self, now: float, seconds: float) -> float:
        """Returns the end of compute that begins `now` and takes `seconds` without collectives beside it."""
        self._busy = sorted(each for each in self._busy if each[1] > now)
        for begin, end in self._busy:
            alone = max(0.0, begin - now)
            if seconds <= alone:
                break
            now, seconds = now + alone, seconds - alone
            done = max(0.0, end - now) * self._costs.beside
            if seconds <= done:
                return now + seconds / self._costs.beside
            now, seconds = max(now, end), seconds - done
        return now + seconds

    def start(self, lane: Lane, name: str, unit: int, seconds: float, nbytes: int, after: float = 0.0) -> float:
        """Queue work on `lane` that begins at the time `after` or later. Returns the time when it is done."""
        self._host += self._costs.host
        if not seconds:
            return max(after, self._host)
        start = max(self._free[lane], self._follows[lane], self._host, after)
        end = self._free[lane] = start + seconds
        if lane in SHARING and self._costs.beside < 1.0:
            self._busy.append((start, end))
        self.spans.append(LaneSpan(lane, name, unit, start, end, nbytes))
        return end

    def follow_compute(self, lane: Lane) -> None:
        """Have later work of `lane` wait for the work that is queued on compute."""
        self._follows[lane] = self.now

    def wait(self, lane: Lane, unit: int, until: float) -> None:
        """Have compute wait for `lane` until the time `until`."""
        start = max(self.now, self._host)
        if until > start:
            self.exposed[lane] += until - start
            self.spans.append(LaneSpan(Lane.COMPUTE, "wait", unit, start, until))
            self._free[Lane.COMPUTE] = until

    def do_beside(self, lane: Lane, name: str, unit: int, seconds: float, nbytes: int) -> None:
        """Do work of `lane` with the other ranks while compute waits, as devices without streams do."""
        if seconds:
            start = max(self.now, self._host)
            seconds += self._costs.waited(start - self._met)
            self._free[lane] = start
            self.wait(lane, unit, self.start(lane, name, unit, seconds, nbytes))
            self._met = self.now
