"""Lanes, which run collectives during compute, and handoffs, which say when compute may touch a lane's result.

No other file names a stream or an event. There are three lanes, `gather`, `reduce` and `all_reduce`, so that the
collectives of one step overlap with compute and with one another, and where saved tensors are offloaded, one for their
copies (`copy_lane`). A lane returns a `Handoff`, and compute touches the
result only after `handoff.wait()`.

On a CPU a lane starts the collective in the background (gloo works on its own threads) and `wait` blocks the caller. On
an accelerator a lane is a stream, `wait` makes the compute stream wait for an event, and the host never blocks.

Memory follows one rule: a buffer belongs to the stream it was allocated on, and goes back to that stream's pool as soon
as the last reference is dropped. So before dropping a lane's buffer that compute reads, call `lane.follow_compute()`.
Before dropping compute's buffer that a lane reads, wait for the lane's handoff. A lane's own buffer that compute only
writes (`lane.lend`) may be dropped as soon as the lane's work on it is queued.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from sherd.comm.transport import Pending

T = TypeVar("T")
Run = Callable[[bool], Pending | None]
"""A function that starts a collective. Called with True, it returns at once, with an object to wait for."""


class Handoff(Protocol):
    """The moment from which compute may touch a lane's result."""

    def wait(self) -> None:
        """Order compute after the lane's collective. May be called more than once."""

    def wait_on_host(self) -> None:
        """Block the caller until the collective has ended: for results in host memory."""


class LaneObserver(Protocol):
    """An object that sees what waits for what among the lanes."""

    def queues(self, lane: str) -> int:
        """Note that a collective is queued on `lane`. Returns its number."""

    def waits(self, lane: str, number: int, on_host: bool) -> None:
        """Note that compute, another lane, or the host waits for collective `number` of `lane`."""

    def follows_event(self) -> None:
        """Note that a lane is to wait for an event of the user's."""


class CommStream(ABC):
    """A queue of collectives that run during compute."""

    @abstractmethod
    def run(self, start: Run, after: Handoff | None = None) -> Handoff:
        """Queue a collective behind the lane's earlier ones and behind `after`. Memory it allocates is the lane's."""

    @abstractmethod
    def follow_compute(self) -> None:
        """Order the lane's later work after all work that compute has queued."""

    @abstractmethod
    def lend(self, allocate: Callable[[], None]) -> None:
        """Have `allocate()` take the lane's memory, for compute to write.

        Compute's next work comes after the lane's earlier work, which may have used the same memory.
        """


class Streams(ABC):
    """The lanes of one device."""

    gather: CommStream
    reduce: CommStream
    all_reduce: CommStream
    in_host_order: bool
    """Memory that the host frees is free for every lane at once, because there are no streams."""

    @abstractmethod
    def begin_step(self, event: torch.Event | None = None) -> None:
        """Let gathers read the shards from now on: after the optimizer's `event` if given, else after compute."""

    @abstractmethod
    def run_beside(self, stream: torch.Stream, work: Callable[[], None]) -> None:
        """Do `work` on the user's `stream`, after compute's earlier work and before its next."""

    def noting(self, queued: Queued) -> AbstractContextManager[None]:
        """Returns a context in which collectives that lanes queue are noted in `queued`."""
        return contextlib.nullcontext()

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Returns a context in which `observer` sees who waits for what; there is nothing to see without streams."""
        return contextlib.nullcontext()


# Without streams


@dataclass(slots=True)
class _Started:
    """A collective under way on gloo's threads."""

    work: Pending | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None  # it holds the collective's buffers

    def wait_on_host(self) -> None:
        self.wait()


class _BackgroundLane(CommStream):
    def run(self, start: Run, after: Handoff | None = None) -> Handoff:
        if after is not None:
            after.wait()
        return _Started(start(True))

    def follow_compute(self) -> None:
        return None

    def lend(self, allocate: Callable[[], None]) -> None:
        allocate()


class HostStreams(Streams):
    """A device without streams: the order of the program is the order of the work."""

    in_host_order = True

    def __init__(self) -> None:
        self.gather = self.reduce = self.all_reduce = _BackgroundLane()

    def begin_step(self, event: torch.Event | None = None) -> None:
        """Do nothing: the optimizer has written when its call returns."""

    def run_beside(self, stream: torch.Stream, work: Callable[[], None]) -> None:
        work()


# With streams


class _Collective:
    """A collective on a lane: the events before and after it, and when it was first seen between them."""

    __slots__ = ("_begun", "_done", "_seen_at")

    def __init__(self, begun: torch.Event, done: torch.Event) -> None:
        self._begun, self._done, self._seen_at = begun, done, 0.0

    @property
    def is_done(self) -> bool:
        return _is_past(self._done)

    def lasts_s(self) -> float:
        """Returns how long the collective has been seen under way; 0 before the device reaches it."""
        if not self._seen_at and _is_past(self._begun):
            self._seen_at = time.monotonic()
        # The clock may stand still between the two calls, and 0 would say that the collective is not under way.
        return max(time.monotonic() - self._seen_at, 1e-6) if self._seen_at else 0.0


def _is_past(event: torch.Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device has failed, and waits for no rank
        return True


class Queued:
    """The collectives in the queues of a device, among the ranks of one mesh. No call waits for the device.

    A collective that stands behind compute is not under way: compute may take as long as it wants.
    """

    NUM_KEPT = 1000
    """Collectives that are kept of each lane."""

    def __init__(self) -> None:
        self._by_lane: dict[int, deque[_Collective]] = {}
        self._lock = threading.Lock()  # between readers; the one thread that adds takes none, as appending is atomic

    def __bool__(self) -> bool:
        """Returns whether a collective was ever added, which never happens without streams."""
        return bool(self._by_lane)

    def add(self, lane: object, begun: torch.Event, done: torch.Event) -> None:
        """Note a collective that was queued on `lane`, between two events."""
        self._by_lane.setdefault(id(lane), deque(maxlen=self.NUM_KEPT)).append(_Collective(begun, done))

    def waits_s(self) -> float:
        """Returns how long the device has been in the oldest collective, since a call of this first saw it in it."""
        with self._lock:
            for lane in list(self._by_lane.values()):
                while lane and lane[0].is_done:
                    lane.popleft()
            # A list of the lanes, because the thread that adds may add one meanwhile.
            return max((lane[0].lasts_s() for lane in list(self._by_lane.values()) if lane), default=0.0)

    def clear(self) -> None:
        with self._lock:
            for lane in list(self._by_lane.values()):
                lane.clear()


class _Notes:
    """The `Queued` in which the lanes of one device note their collectives now; None for nowhere."""

    def __init__(self) -> None:
        self.queued: Queued | None = None

    @contextmanager
    def into(self, queued: Queued) -> Iterator[None]:
        before, self.queued = self.queued, queued
        try:
            yield
        finally:
            self.queued = before


class _Recorded:
    """An event on a lane's stream."""

    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device = device
        self.event = event

    def wait(self) -> None:
        # The stream that is current at this call is compute's, whichever it was when the collective was queued.
        torch.accelerator.current_stream(self._device).wait_event(self.event)

    def wait_on_host(self) -> None:
        if not self.event.query():
            self.event.synchronize()


class _StreamLane(CommStream):
    def __init__(self, device: torch.device, priority: int, notes: _Notes) -> None:
        self._device = device
        self._stream = torch.Stream(device, priority=priority)
        self._notes = notes

    def run(self, start: Run, after: Handoff | None = None) -> _Recorded:
        if isinstance(after, _Recorded):
            self._stream.wait_event(after.event)
        queued = self._notes.queued
        with self._stream:
            if queued is None:
                start(False)
                return _Recorded(self._device, self._stream.record_event())
            begun = self._stream.record_event()
            start(False)
            done = self._stream.record_event()
        queued.add(self, begun, done)
        return _Recorded(self._device, done)

    def follow_compute(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def lend(self, allocate: Callable[[], None]) -> None:
        compute = torch.accelerator.current_stream(self._device)
        # The lane's pool may hand out memory that compute read last: a gradient that was dropped after the step.
        self._stream.wait_stream(compute)
        with self._stream:
            # The lane's earlier work may still read this memory, so compute waits below before it writes.
            allocate()
        compute.wait_stream(self._stream)

    def follow_event(self, event: torch.Event) -> None:
        self._stream.wait_event(event)


class _ObservedHandoff(_Recorded):
    """A handoff that tells an observer who waits for it. `after`: what its own collective has waited for."""

    def __init__(
        self, device: torch.device, event: torch.Event, note: Callable[[bool], None], after: Handoff | None
    ) -> None:
        super().__init__(device, event)
        self._note, self._after = note, after

    def wait(self) -> None:
        self.is_waited_for()
        super().wait()

    def wait_on_host(self) -> None:
        self._note(True)
        super().wait_on_host()

    def is_waited_for(self) -> None:
        """Note that a stream waits: with it, for all that came before on the way here."""
        self._note(False)
        if isinstance(self._after, _ObservedHandoff):
            self._after.is_waited_for()


class _ObservedLane(_StreamLane):
    """The same stream as `lane`, seen by an observer."""

    def __init__(self, name: str, lane: _StreamLane, observer: LaneObserver) -> None:
        self._device, self._stream, self._notes = lane._device, lane._stream, lane._notes
        self._name, self._observer = name, observer

    def run(self, start: Run, after: Handoff | None = None) -> _Recorded:
        handoff = super().run(start, after)
        note = partial(self._observer.waits, self._name, self._observer.queues(self._name))
        return _ObservedHandoff(self._device, handoff.event, note, after)

    def follow_event(self, event: torch.Event) -> None:
        self._observer.follows_event()
        super().follow_event(event)


class DeviceStreams(Streams):
    """An accelerator: one stream per lane, of high priority so that communication is not queued behind compute."""

    in_host_order = False
    gather: _StreamLane

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._notes = notes = _Notes()
        self.gather = _StreamLane(device, -1, notes)
        self.reduce = _StreamLane(device, -1, notes)
        self.all_reduce = _StreamLane(device, 0, notes)

    def begin_step(self, event: torch.Event | None = None) -> None:
        """Order later gathers after `event`, or after compute. The other lanes read no shards."""
        if event is not None:
            self.gather.follow_event(event)
        else:
            self.gather.follow_compute()

    def run_beside(self, stream: torch.Stream, work: Callable[[], None]) -> None:
        """Do `work` on `stream`, between compute's earlier work and its next."""
        compute = torch.accelerator.current_stream(self._device)
        stream.wait_stream(compute)
        with stream:
            work()
        compute.wait_stream(stream)

    def noting(self, queued: Queued) -> AbstractContextManager[None]:
        """Returns a context in which collectives are noted in `queued`; without effect while a graph is captured."""
        if is_capturing(self._device):
            queued.clear()  # a query of an event, also of an earlier one, would break the capture
            return contextlib.nullcontext()
        return self._notes.into(queued)

    @contextmanager
    def observed(self, observer: LaneObserver) -> Iterator[None]:
        """A context in which `observer` sees who waits for what is queued inside it."""
        lanes = {name: getattr(self, name) for name in ("gather", "reduce", "all_reduce")}
        try:
            vars(self).update({name: _ObservedLane(name, lane, observer) for name, lane in lanes.items()})
            yield
        finally:
            vars(self).update(lanes)


# Finding them

_by_device: dict[torch.device, Streams] = {}
_replaced: ContextVar[Streams | None] = ContextVar("sherd_streams", default=None)


def streams_for(device: torch.device) -> Streams:
    """Returns the lanes of `device`: one set for all models on it, so that memory is not split between sets."""
    replaced = _replaced.get()
    if replaced is not None:
        return replaced
    if device not in _by_device:
        _by_device[device] = HostStreams() if device.type in ("cpu", "meta") else DeviceStreams(device)
    return _by_device[device]


under_way: dict[int, Handoff] = {}
"""What is still to happen to shards on the host, by id: steps on a thread, and copies of gradients that they read."""


def wait_for_steps() -> None:
    """Block the caller until what is `under_way` has ended. Raises the first of its errors."""
    errors = []
    for key, work in list(under_way.items()):
        try:
            work.wait_on_host()
        except Exception as error:
            errors.append(error)
        under_way.pop(key, None)  # not before: another thread may be here, too
    if errors:
        raise errors[0]


def wait_for_copies_to(memory: torch.Tensor) -> None:
    """Block the caller until copies to `memory`, if it is page-locked, have ended, whichever lane they are on."""
    wait_for_steps()
    if memory.is_pinned():
        torch.accelerator.synchronize()


def copy_lane(device: torch.device) -> CommStream:
    """Returns a lane of its own on an accelerator, for copies from and to the host. No rank waits in it for another."""
    return _StreamLane(device, 0, _Notes())


@contextmanager
def use_streams(streams: Streams) -> Iterator[None]:
    """A context in which new units use these lanes, for example recording ones in a test."""
    token = _replaced.set(streams)
    try:
        yield
    finally:
        _replaced.reset(token)


class RecordingStreams(Streams):
    """Lanes for tests and plans: they log each call in order, and run it as `HostStreams` does."""

    in_host_order = False

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.gather, self.reduce, self.all_reduce = (
            _RecordingLane(name, self.log) for name in ("gather", "reduce", "all_reduce")
        )

    def begin_step(self, event: torch.Event | None = None) -> None:
        self.log.append(("gather", "follow event" if event is not None else "follow compute"))

    def run_beside(self, stream: torch.Stream, work: Callable[[], None]) -> None:
        self.log.append(("compute", "run alongside"))
        work()


class _RecordingLane(_BackgroundLane):
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self._name = name
        self._log = log

    def run(self, start: Run, after: Handoff | None = None) -> Handoff:
        if isinstance(after, _RecordedWait):
            # Past the recorded handoff, which would log a wait of compute: it is the lane that waits.
            self._log.append((self._name, "follow handoff"))
            after = after.inner
        if after is not None:
            after.wait()
        self._log.append((self._name, "run"))
        # In the foreground: an owner drops buffers once the work on them is queued, so it must be over by then.
        return _RecordedWait(self._name, self._log, _Started(start(False)))

    def follow_compute(self) -> None:
        self._log.append((self._name, "follow compute"))

    def lend(self, allocate: Callable[[], None]) -> None:
        self._log.append((self._name, "lend"))
        allocate()


class _RecordedWait:
    def __init__(self, name: str, log: list[tuple[str, str]], handoff: Handoff) -> None:
        self._name = name
        self._log = log
        self.inner = handoff

    def wait(self) -> None:
        self._log.append(("compute", f"follow {self._name}"))
        self.inner.wait()

    def wait_on_host(self) -> None:
        self._log.append(("host", f"follow {self._name}"))
        self.inner.wait_on_host()


# Graphs


def is_capturing(device: torch.device) -> bool:
    """Returns whether compute's stream is being captured as a graph, so that the host must not ask the device."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """A context in which compute runs on a side stream, as a capture asks; without streams it is as outside.

    A side stream that is current stays: autograd keeps the one on which it first met a parameter for later captures.
    """
    if device.type == "cpu" or torch.accelerator.current_stream(device).stream_id:
        yield
        return
    stream, usual = torch.Stream(device), torch.accelerator.current_stream(device)
    stream.wait_stream(usual)
    try:
        with stream:
            yield
    finally:
        usual.wait_stream(stream)


def recorded(step: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Returns a function that replays `step`, captured as a graph on the current stream, which must be a side stream.

    It returns what `step` has returned: the same tensors each time.

    Raises:
        RuntimeError: the device cannot capture the step.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device meanwhile: a watchdog, NCCL's or the guard's, queries events.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
        result = step()

    def replay() -> T:
        graph.replay()
        return result

    return replay
