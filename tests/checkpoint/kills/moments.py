"""Counts a rank's calls to the system in one folder, and has something happen at one of them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sherd.checkpoint.ranks import Ranks
from sherd.errors import CommError
from sherd.storage import places
from tests.checkpoint.kills.cases import ANY, GATHER, Act, Moment

_CHANGES = {"mkdir", "rmdir", "replace", "unlink"}


class Calls:
    """The calls of this process into `folder`. `tell` is called with a word before something happens."""

    def __init__(self, folder: str, act: Act, moment: Moment | None, tell: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._folder, self._act, self._moment, self._tell = folder, act, moment, tell
        self._is_reached = False
        for name in ("open", "mkdir", "rmdir", "replace", "unlink", "scandir"):
            self._patch(os, name, self._is_path_inside)
        for name in ("fsync", "preadv"):
            self._patch(os, name, self._is_file_inside)
        self._patch(fcntl, "flock", self._is_file_inside)
        gather = Ranks.gather
        Ranks.gather = lambda *args: self.gather(lambda: gather(*args))  # type: ignore[method-assign]
        places.open = self._open  # type: ignore[attr-defined]

    def _patch(self, module: Any, name: str, is_inside: Callable[[Any], bool]) -> None:
        function = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not is_inside(args[0]):
                return function(*args, **kwargs)
            changes = name in _CHANGES or (name == "open" and args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            return self.call(name, lambda: function(*args, **kwargs), bool(changes))

        setattr(module, name, counted)

    def _is_path_inside(self, path: Any) -> bool:
        return str(path).startswith(self._folder)

    def _is_file_inside(self, fd: Any) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(self._folder)
        except OSError:
            return False

    def _open(self, path: Any, *args: Any, **kwargs: Any) -> _File:
        return _File(self.call("open", lambda: open(path, *args, **kwargs), True), self)

    def call(self, name: str, function: Callable[[], Any], changes: bool, half: Callable[[], Any] | None = None) -> Any:
        """Returns what `function` returns, unless what happens hinders it. `half` does a part of it."""
        self.counts[name] += 1
        self.counts[ANY] += 1
        moment = self._moment
        is_now = (
            moment is not None
            and not self._is_reached
            and moment.call in (name, ANY)
            and self.counts[moment.call] == moment.number
        )
        self._is_reached |= is_now
        if is_now and moment is not None and self._act in (Act.KILL, Act.KILL_ALL, Act.STOP):
            if moment.is_after:
                function()
            elif half is not None:
                half()
            self._end()
        if self._act is Act.BROKEN and is_now:
            self._tell("broken")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._is_reached and self._act is Act.READ_ONLY and changes:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._is_reached and self._act is Act.FULL and (half is not None or (changes and name == "mkdir")):
            if half is not None and is_now:
                half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_now:
            self._tell("reached")
        return function()

    def gather(self, function: Callable[[], Any]) -> Any:
        """Returns what `function` returns. A rank that is cut off raises a CommError though all ranks have been heard,
        as one may whose neighbour dies just then."""
        self.counts[GATHER] += 1
        found = function()
        moment = self._moment
        if self._act is Act.CUT_OFF and moment is not None and self.counts[GATHER] == moment.number:
            self._tell("reached")
            raise CommError("another rank has died, it is said")
        return found

    def _end(self) -> None:
        if self._act is Act.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self._tell("stop" if self._act is Act.STOP else "all")
        if self._act is Act.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # until all are killed


class _File:
    """A file open for writing."""

    def __init__(self, file: Any, calls: Calls) -> None:
        self._file, self._calls = file, calls

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, chunk: memoryview) -> int:
        write = self._file.write
        return self._calls.call("write", lambda: write(chunk), True, half=lambda: write(chunk[: len(chunk) // 2]))
