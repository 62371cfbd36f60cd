"""Is anything left of a run: processes, segments of shared memory, temporary files?"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sherd.guard.flight import FOLDER

EXPECTED = "torchinductor_"
"""What is made on purpose: the cache of torch's compiler."""
MARK = "BENCH_GPUS_RUN"
"""A variable by which the processes of this run are found again."""
END_S = 5.0
"""A process that was killed may still be on its way out."""


@contextmanager
def left_behind() -> Iterator[list[str]]:
    """Inside, temporary files are in a folder that goes on leaving, flight records are not written, and the list is
    empty: then it holds what was left of the run, in words."""
    left: list[str] = []
    shared, own = shared_memory(), str(os.getpid())
    folder = tempfile.mkdtemp(prefix="sherd-gpus-")
    before = {name: os.environ.get(name) for name in ("TMPDIR", FOLDER, MARK)}, tempfile.tempdir
    os.environ.update({"TMPDIR": folder, FOLDER: "", MARK: own})
    tempfile.tempdir = folder
    try:
        yield left
    finally:
        for name, value in before[0].items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = before[1]
        until = time.monotonic() + END_S
        while (processes := _processes(own)) and time.monotonic() < until:
            time.sleep(0.1)
        left += [f"process {each}" for each in processes]
        now, of_others = shared_memory(), mapped_by(lambda _: True)
        left += [str(now[each]) for each in sorted(now.keys() - shared.keys() - of_others)]
        # A folder for each part, which may be empty.
        left += [str(each) for each in sorted(Path(folder).glob("*/*")) if not each.name.startswith(EXPECTED)]
        shutil.rmtree(folder, ignore_errors=True)


def _processes(mark: str) -> list[str]:
    """Those that were started in this run, but Python's own tracker of resources, which ends with this process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            started_here = f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # of another user, or gone
            continue
        if started_here and words and place.name != mark and "resource_tracker" not in words:
            found.append(place.name)
    return found


def shared_memory() -> dict[int, Path]:
    """This user's segments, by inode."""
    found = {}
    for place in Path("/dev/shm").glob("*"):
        with suppress(OSError):  # gone
            about = place.stat()
            if about.st_uid == os.getuid():
                found[about.st_ino] = place
    return found


def mapped_by(is_asked: Callable[[int], bool]) -> set[int]:
    """The inodes of segments that processes have mapped, of those that this user may look at. The names in their maps
    may be others: a semaphore is made under a name of its own."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or gone
            if is_asked(int(place.name)):
                lines = (place / "maps").read_text().splitlines()
                found |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return found
