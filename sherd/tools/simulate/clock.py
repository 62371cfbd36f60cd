"""The clock: lanes of work that run beside one another, as in `sherd/comm/streams.py`.

The host queues work, one thing after the other. On a device with streams, compute and each kind of collective have a
lane of their own, and what is queued on a lane runs as soon as what it needs is there. Without streams the host itself
computes, and a collective takes its time when it is waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sherd.tools.simulate.timeline import Lane, Span
from sherd.tools.simulate.work import Group, Op


class Costs(ABC):
    """The seconds that things take on one rank.

    Attributes:
        overlaps: collectives run beside compute.
        host: seconds of the host for each operation or collective that it queues.
        beside: the share of its speed that compute keeps while a collective runs.
    """

    overlaps: bool
    host: float
    beside: float = 1.0

    @abstractmethod
    def op(self, op: Op) -> float:
        """Returns the seconds of an operation."""

    @abstractmethod
    def copied(self, nbytes: int) -> float:
        """Returns the seconds in which so many bytes are read or written in the memory of the device."""

    @abstractmethod
    def collective(self, kind: str, nbytes: int, group: Group) -> float:
        """Returns the seconds of a collective; see `costs.collective_seconds`."""

    def waited(self, computed: float) -> float:
        """Returns the seconds in which ranks wait for the slowest, after each has computed for so many."""
        return 0.0

    @abstractmethod
    def to_host(self, nbytes: int) -> float:
        """Returns the seconds in which `nbytes` travel between the device and its host."""

    @abstractmethod
    def optimizer(self, nbytes: int, num_tensors: int, on_host: bool) -> float:
        """Returns the seconds of an optimizer's step that reads or writes so many tensors, of `nbytes` together."""


SHARING = (Lane.GATHER, Lane.REDUCE, Lane.ALL_REDUCE)
"""The lanes whose work takes processors of the device. Copies to the host have engines of their own."""


class Clock:
    """Times of one rank's lanes, in seconds.

    Attributes:
        spans: what was done, in the order of queueing.
        exposed: seconds that compute has waited, by the lane it has waited for.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._free = dict.fromkeys(Lane, 0.0)
        self._follows = dict.fromkeys(Lane, 0.0)
        self._host = 0.0
        self._met = 0.0
        """When the ranks have last waited for one another, without streams."""
        self._busy: list[tuple[float, float]] = []
        """When collectives run that take a part of the device from compute."""
        self.spans: list[Span] = []
        self.exposed = dict.fromkeys(Lane, 0.0)

    @property
    def now(self) -> float:
        """The moment when compute has done what was queued."""
        return self._free[Lane.COMPUTE]

    def compute(self, name: str, unit: int, seconds: float, num_queued: int = 1) -> None:
        """Queue operations on compute that take so many seconds together. The device begins once the first one is
        queued, and is not done before the last one is. What follows at once and is alike is one span."""
        start = max(self.now, self._host + min(1, num_queued) * self._costs.host)
        self._host += num_queued * self._costs.host
        end = self._free[Lane.COMPUTE] = max(self._end_beside_collectives(start, seconds), self._host)
        last = self.spans[-1] if self.spans else None
        if last and (last.lane, last.name, last.unit, last.end) == (Lane.COMPUTE, name, unit, start):
            self.spans[-1] = Span(Lane.COMPUTE, name, unit, last.start, end)
        elif end > start:
            self.spans.append(Span(Lane.COMPUTE, name, unit, start, end))

    def _end_beside_collectives(self, now: float, seconds: float) -> float:
        """Returns when compute is done that begins now, and takes so many `seconds` alone."""
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
        """Queue work on `lane`, not before the moment `after`. Returns when it is done."""
        self._host += self._costs.host
        if not seconds:
            return max(after, self._host)
        start = max(self._free[lane], self._follows[lane], self._host, after)
        end = self._free[lane] = start + seconds
        if lane in SHARING and self._costs.beside < 1.0:
            self._busy.append((start, end))
        self.spans.append(Span(lane, name, unit, start, end, nbytes))
        return end

    def follow_compute(self, lane: Lane) -> None:
        """Have later work of `lane` wait for what is queued on compute until now."""
        self._follows[lane] = self.now

    def wait(self, lane: Lane, unit: int, until: float) -> None:
        """Have compute wait until the moment `until`, for `lane`."""
        start = max(self.now, self._host)
        if until > start:
            self.exposed[lane] += until - start
            self.spans.append(Span(Lane.COMPUTE, "wait", unit, start, until))
            self._free[Lane.COMPUTE] = until

    def do_beside(self, lane: Lane, name: str, unit: int, seconds: float, nbytes: int) -> None:
        """Do work of `lane` with the other ranks while compute waits for it: the way without streams."""
        if seconds:
            start = max(self.now, self._host)
            seconds += self._costs.waited(start - self._met)
            self._free[lane] = start
            self.wait(lane, unit, self.start(lane, name, unit, seconds, nbytes))
            self._met = self.now
