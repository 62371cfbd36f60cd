"""Tells whether a forward that began is still running: an exception that is no `Exception` (Ctrl-C) passes torch's
hooks by, also those that are always called, so no hook says that the forward has ended."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType

from sherd._torch import MODULE_CALL, frames_from
from sherd.engine.run.unit import Unit


class UnderWay:
    """The module call that is being made now, to be looked for later on the stack of its thread.

    It holds the call's frame, for another frame may get the same address: let go of it when the call has ended.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        self._call = frame

    @property
    def is_over(self) -> bool:
        """Whether the call has certainly ended. Of other threads nothing is known."""
        if self._call is None or self._thread != threading.get_ident():
            return False
        return all(each is not self._call for each in frames_from(sys._getframe()))


@dataclass(frozen=True, slots=True)
class Call:
    """A forward under way. `opens_run`: it is the first of its unit's modules to run in this pass.

    `handling` is the exception that was being handled when it began, to tell a new one from. `under_way`: of the first
    of the calls under way, whether it still is. `watches`: what `end_watching` is to be told.
    """

    unit: Unit
    module: int
    outermost: bool
    opens_run: bool
    recomputing: bool
    handling: BaseException | None
    under_way: UnderWay | None
    watches: bool
