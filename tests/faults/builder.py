"""Faults: what goes wrong on one rank of a training, and when.

    fault = Fault(rank=1, step=2, phase=Phase.BACKWARD, kind=Kind.KILL)
    probe = Probe(fault, rank, tell)                      on each rank

The program calls `probe.at(...)` wherever a phase is. The probe of the fault's rank acts in its step and phase, once.
It tells when it acts, so that somebody else can do what a rank cannot do to itself: wake it up, or cut a cable.

    probe.at(Phase.BEFORE_FORWARD)                        x = probe.at(Phase.FORWARD, x, unit=1)
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Phase(Enum):
    """Where in a step."""

    BEFORE_FORWARD = "before forward"
    FORWARD = "in the forward of a unit"
    BETWEEN = "between forward and backward"
    BACKWARD = "in backward, behind a unit"
    BEFORE_STEP = "before the optimizer's step"
    STEP = "in the optimizer's step"
    CHECKPOINT = "in a checkpoint"


class Kind(Enum):
    """What goes wrong."""

    SKIP = "skips a unit"
    REPEAT = "runs a unit twice"
    REORDER = "runs units in another order"
    RAISE = "raises, and nobody catches it"
    CATCH = "raises, and the loop goes on with the next batch"
    OOM = "out of memory, and nobody catches it"
    CATCH_OOM = "out of memory, and the loop goes on with the next batch"
    LEAVE = "sys.exit"
    EXIT = "os._exit"
    KILL = "SIGKILL"
    STOP = "SIGSTOP, for longer than the timeout"
    PAUSE = "SIGSTOP, and SIGCONT soon"
    LATE = "sleeps for longer than the timeout"
    SLOW = "sleeps for a moment"
    NAN = "computes NaN"
    FULL_DISK = "the disk is full, and nobody catches it"
    CATCH_FULL_DISK = "the disk is full, and the loop goes on"
    CUT = "its machine's link is cut"
    BREAK = "its machine's link is cut, and soon mended"
    OTHERWISE = "has made its units otherwise, or changes them"
    ANYWHERE = "raises at any call into sherd, and the loop goes on"
    READ = "a file of the checkpoint that it loads gives a read error"


ROUTES = {Kind.SKIP, Kind.REPEAT, Kind.REORDER}
"""They change which units run in a forward, and in which order."""
DISK = {Kind.FULL_DISK, Kind.CATCH_FULL_DISK}
LINK = {Kind.CUT, Kind.BREAK}
CAUGHT = {Kind.CATCH, Kind.CATCH_OOM, Kind.CATCH_FULL_DISK, Kind.ANYWHERE}
FATAL = {Kind.RAISE, Kind.OOM, Kind.LEAVE, Kind.EXIT, Kind.KILL, Kind.FULL_DISK}
"""The rank's process ends."""
HARMLESS = {Kind.PAUSE, Kind.SLOW, Kind.BREAK, Kind.CATCH_FULL_DISK}
"""They change nothing."""
SILENT = {Kind.STOP, Kind.LATE, Kind.CUT}
"""Nothing is heard of the rank until the timeout of the process group."""

MADE = ("placement", "strategy", "computed in", "reduced in", "parts")
CHANGED = ("divided by", "frozen", "unused", "hook")
"""The ways in which units are made, or changed before a forward, otherwise."""

EXIT_CODE = 3
MOMENT_S = 0.3
"""Of the faults that last a moment."""


def phases_of(kind: Kind) -> tuple[Phase, ...]:
    """Returns where `kind` may happen."""
    if kind in ROUTES:
        return (Phase.FORWARD,)
    if kind in DISK:
        return (Phase.CHECKPOINT,)
    if kind in (Kind.OTHERWISE, Kind.ANYWHERE):
        return (Phase.BEFORE_FORWARD,)
    if kind is Kind.READ:
        return (Phase.CHECKPOINT,)
    if kind is Kind.NAN:
        return Phase.BEFORE_FORWARD, Phase.FORWARD, Phase.BACKWARD
    return tuple(Phase)


class Injected(Exception):
    """What a fault raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one rank.

    Raises:
        ValueError: that kind cannot happen in that phase.
    """

    rank: int
    step: int
    phase: Phase
    kind: Kind
    unit: int = 1
    """The unit that is skipped, repeated or changed, or in whose forward or backward it happens; the file that cannot
    be read."""
    way: str = ""
    """What is otherwise about units."""
    share: float = 0.0
    """Which of a step's calls raises: where it is among all."""

    def __post_init__(self) -> None:
        if self.phase not in phases_of(self.kind):
            possible = ", ".join(phase.name for phase in phases_of(self.kind))
            raise ValueError(f"{self.kind.name} cannot happen in phase {self.phase.name}: choose among {possible}")

    @property
    def has_unit(self) -> bool:
        """Whether the unit matters."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)

    def order(self, rank: int, step: int, units: Sequence[int]) -> tuple[int, ...]:
        """Returns which of `units` that rank runs in that step, in their order."""
        if self.kind not in ROUTES or (rank, step) != (self.rank, self.step):
            return tuple(units)
        if self.kind is Kind.SKIP:
            return tuple(unit for unit in units if unit != self.unit)
        if self.kind is Kind.REPEAT:
            return (*units, self.unit)
        return tuple(reversed(units))

    def __str__(self) -> str:
        where = f" {self.unit}" if self.has_unit else ""
        more = f" ({self.way})" if self.way else f" ({self.share:.3f})" if self.kind is Kind.ANYWHERE else ""
        return f"rank {self.rank}, step {self.step}, {self.phase.value}{where}: {self.kind.value}{more}"


@dataclass(slots=True)
class Probe:
    """The fault as one rank meets it.

    Args:
        fault: the fault; None for a rank of a training without one.
        rank: this rank.
        tell: called once, at the moment when this rank's fault happens. Whoever hears it carries out faults of the
            link, and wakes up a rank that has stopped.
        late_s: how long LATE sleeps.
    """

    fault: Fault | None
    rank: int
    tell: Callable[[], None]
    late_s: float = 1.0
    step: int = -1
    has_acted: bool = False
    num_calls: int = 0
    """Into sherd, in the step before the one with the fault, where one of them is to raise."""

    def at(self, phase: Phase, x: Any = None, unit: int | None = None) -> Any:
        """Act, if the fault is here; returns `x`, or what the fault makes of it."""
        fault = self.fault
        if fault is None or self.has_acted or (fault.rank, fault.step) != (self.rank, self.step):
            return x
        if fault.has_unit and (fault.phase not in (phase, Phase.BACKWARD) or unit != fault.unit):
            return x
        if fault.phase is Phase.BACKWARD and phase is Phase.FORWARD:
            x.register_hook(self._in_backward)
            return x
        if fault.kind is Kind.ANYWHERE:
            return self._act(x) if phase is Phase.CHECKPOINT else x  # the step had fewer calls than the one before
        if fault.phase is not phase or fault.kind in DISK | {Kind.OTHERWISE, Kind.READ}:
            return x
        return self._act(x)

    def watch_calls(self) -> None:
        """In the step before that of the fault count calls into sherd; in that of the fault raise at one."""
        fault = self.fault
        if fault is None or fault.kind is not Kind.ANYWHERE or fault.rank != self.rank:
            return
        left = 1 + int(fault.share * self.num_calls)

        def called(frame: Any, event: str, arg: object) -> None:
            nonlocal left
            # Python ignores what is raised in a `__del__`, a weak reference's callback and a generator that is closed.
            is_heard = frame.f_code.co_name not in ("__del__", "_forget", "<genexpr>")
            if event != "call" or not is_heard or "/sherd/engine/" not in frame.f_code.co_filename:
                return
            if self.step < fault.step:
                self.num_calls += 1
            elif left > 0:
                left -= 1
                if not left:
                    sys.setprofile(None)
                    self._act(None)

        sys.setprofile(called if self.step in (fault.step - 1, fault.step) and not self.has_acted else None)

    def made_otherwise(self) -> str:
        """Returns in which way this rank makes its units otherwise."""
        fault = self.fault
        if fault is None or fault.way not in MADE or fault.rank != self.rank:
            return ""
        self._note()
        return fault.way

    def changes_otherwise(self) -> str:
        """Returns in which way this rank changes a unit now."""
        fault = self.fault
        if fault is None or fault.way not in CHANGED or (fault.rank, fault.step) != (self.rank, self.step):
            return ""
        self._note()
        return fault.way

    def cannot_read(self) -> int | None:
        """Returns the number of the file that this rank cannot read now; None for all that are well."""
        fault = self.fault
        if fault is None or fault.kind is not Kind.READ or fault.step != self.step or fault.rank != self.rank:
            return None
        self._note()
        return fault.unit

    def _in_backward(self, grad: Tensor) -> Tensor:
        return grad if self.has_acted else self._act(grad)

    def route(self, units: Sequence[int]) -> tuple[int, ...]:
        """Returns which units to run, in their order."""
        if self.fault is None:
            return tuple(units)
        order = self.fault.order(self.rank, self.step, units)
        if order != tuple(units):
            self._note()
        return order

    def disk(self, path: str) -> str:
        """Returns where to write what belongs to `path`: at a fault of the disk, a device that is always full."""
        fault = self.fault
        if fault is None or fault.kind not in DISK or (fault.rank, fault.step) != (self.rank, self.step):
            return path
        self._note()
        return "/dev/full"

    def _note(self) -> None:
        self.has_acted = True
        self.tell()

    def _act(self, x: Any) -> Any:
        assert self.fault is not None, "somebody has found it here"
        kind = self.fault.kind
        if kind in ROUTES:
            return x  # of which `route` takes care
        self._note()
        match kind:
            case Kind.NAN:
                return x * float("nan")
            case Kind.RAISE | Kind.CATCH | Kind.ANYWHERE:
                raise Injected(str(self.fault))
            case Kind.OOM | Kind.CATCH_OOM:
                raise torch.OutOfMemoryError(str(self.fault))
            case Kind.LEAVE:
                sys.exit(EXIT_CODE)
            case Kind.EXIT:
                os._exit(EXIT_CODE)
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP | Kind.PAUSE:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.SLOW:
                time.sleep(MOMENT_S)
            case Kind.LATE:
                time.sleep(self.late_s)
        return x


def is_caught(fault: Fault | None, error: BaseException) -> bool:
    """Returns whether the loop goes on after `error`: it is what the fault has raised, and meant to be caught."""
    if fault is None or fault.kind not in CAUGHT:
        return False
    if fault.kind is Kind.CATCH_FULL_DISK:
        return isinstance(error, OSError) and error.errno == errno.ENOSPC
    return str(error) == str(fault) and isinstance(error, Injected | torch.OutOfMemoryError)
