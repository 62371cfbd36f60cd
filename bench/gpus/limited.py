"""Work in a process of its own, which is stopped at a limit with all that it has started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ..device.groups import Failed, in_a_line
from .left import mapped_by, shared_memory

END_S = 5.0
"""How long a process that was killed may take to end. One that its driver holds is left, and told as left behind."""
LOOK_S = 1.0


def told(
    work: Callable[..., Iterator[Any]], *given: Any, until: float, now: Callable[[], float] = time.monotonic
) -> Generator[Any, None, None]:
    """Yields what `work(*given)` yields in a session of its own, with a folder of its own for temporary files.

    When this ends, however it ends, no process of that session is alive. What was stopped has no files left, and no
    segments in /dev/shm.

    Raises:
        Failed: the work raised, its process died, or `now()` has reached `until`.
    """
    context = get_context("spawn")
    folder, before = tempfile.mkdtemp(prefix="part-"), shared_memory()
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(theirs, folder, work, given))
    process.start()
    theirs.close()
    session = process.pid
    assert session is not None, "it was started"
    try:
        yield from _received(ours, until, now)
    except BaseException:
        own = mapped_by(lambda process: os.getsid(process) == session) - before.keys()
        _kill(session)
        for inode, segment in shared_memory().items():
            if inode in own:
                segment.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _kill(session)
        process.kill()  # it has not begun its session
        process.join(END_S)
        ours.close()


def _received(pipe: Connection, until: float, now: Callable[[], float]) -> Iterator[Any]:
    while (left := until - now()) > 0:
        if pipe.poll(min(left, LOOK_S)):
            try:
                is_last, value, why = pipe.recv()
            except (EOFError, OSError):
                raise Failed("its process died") from None
            if why:
                raise Failed(why)
            if is_last:
                return
            yield value
    raise Failed("stopped: its time was up")


def _kill(session: int) -> None:
    with contextlib.suppress(OSError):  # none of it is there
        os.killpg(session, signal.SIGKILL)


def _tell(pipe: Connection, folder: str, work: Callable[..., Iterator[Any]], given: tuple[Any, ...]) -> None:
    """In the process: work, until the asker is gone."""
    os.setsid()
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        for value in work(*given):
            pipe.send((False, value, ""))
        pipe.send((True, None, ""))
    except Exception as error:
        pipe.send((True, None, in_a_line(error)))


def _end_with(pipe: Connection) -> None:
    """Nothing is ever sent to the process: the pipe ends when the asker does, be it killed."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os.killpg(0, signal.SIGKILL)
