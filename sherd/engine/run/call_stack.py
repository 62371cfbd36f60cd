"""The call stack, and what it tells: whether a forward that began is still running, and the user's own line.

An exception that is no `Exception` (Ctrl-C) passes torch's hooks by, also those that are always called, so no hook says
that the forward has ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from sherd._torch import MODULE_CALL
from sherd.engine.run.unit import Unit

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["sherd"], contextlib))


class UnderWay:
    """The module call that is being made now, to be looked for later on the stack of its thread.

    It holds the call's frame, for another frame may get the same address: let go of it when the call has ended.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._call = next((each for each in _from(sys._getframe()) if each.f_code is MODULE_CALL), None)

    @property
    def is_over(self) -> bool:
        """Whether the call has certainly ended. Of other threads nothing is known."""
        if self._call is None or self._thread != threading.get_ident():
            return False
        return all(each is not self._call for each in _from(sys._getframe()))


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


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame, from `frame` on, of code that is neither sherd's nor torch's."""
    return next((each for each in _from(frame) if not each.f_code.co_filename.startswith(_LIBRARIES)), None)


def line_of(frame: FrameType | None) -> str:
    """Returns the line that `frame` is at, "file:number"."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _from(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
