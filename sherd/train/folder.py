"""The folders of runs: runs/1, runs/2, ... unless the user names another. One run at a time writes into a folder.

Rank 0 holds a lock (flock) on OUT/.lock. The system drops the lock when that process has ended, however it ends; the
file stays. On shared file systems it holds as far as their flock goes: NFS and Lustre mounted with `flock` have it for
all machines, others for the processes of one machine, or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
from pathlib import Path

from sherd.errors import CheckpointError
from sherd.storage.places import DiskPlace, Lock, mode_of
from sherd.train.config import InputError
from sherd.train.saved import NoCheckpoint, folder_in, newest

RUNS = Path("runs")
LOCK, MARK = ".lock", ".seen-"


def _runs() -> list[int]:
    return sorted(int(path.name) for path in RUNS.glob("*") if path.name.isdigit())


def last_run() -> Path:
    """Returns the newest numbered run that has a checkpoint. Raises NoCheckpoint where none has."""
    for number in reversed(_runs()):
        with contextlib.suppress(NoCheckpoint):
            newest(folder_in(out := RUNS / str(number)))
            return out
    found = "no run with a checkpoint" if _runs() else "no run"
    raise NoCheckpoint(f"there is {found} under {RUNS.absolute()}; name a run's folder")


def claimed(named: str, held: contextlib.ExitStack) -> tuple[Path, bool]:
    """Make the folder `named`, or the next number under `runs`, and lock it until `held` is closed.

    Returns the folder, and whether it is new. Raises InputError if it cannot be written, or another run writes into it.
    """
    try:
        out, is_new = (Path(named), not mode_of(Path(named))) if named else (_numbered(), True)
        if held.enter_context(DiskPlace(out).locked(shared=False, make=True)) is Lock.BUSY:
            raise InputError(f"{out} is in use by another run; wait for its end, or choose another --out")
        probe = out / ".writable"  # a lock file from before says nothing of the folder
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {named or RUNS.absolute()}: {error.strerror}; choose another --out"
        ) from error
    return out, is_new


def _numbered() -> Path:
    """A new folder."""
    for number in range(max(_runs(), default=0) + 1, 1 << 62):
        with contextlib.suppress(FileExistsError):  # another start was quicker
            (out := RUNS / str(number)).mkdir(parents=True)
            return out
    raise AssertionError("there are more numbers than folders")


def is_free(out: Path) -> bool:
    """Returns whether a run can start in `out`: it is not there, or empty but for a lock and marks of killed starts.

    Raises:
        InputError: it cannot be read now.
    """
    try:
        mode = mode_of(out)
        return not mode or (stat.S_ISDIR(mode) and all(path.name.startswith((LOCK, MARK)) for path in out.iterdir()))
    except OSError as error:
        raise InputError(f"{out} cannot be read: {error}; choose another --out") from error


def drop_if_empty(out: Path) -> None:
    """Remove a folder that this run has made, if nothing of worth has come into it; and `runs`, if that is empty."""
    with contextlib.suppress(OSError, InputError):  # it cannot be read, or other runs are there
        if is_free(out):
            shutil.rmtree(out)
            if out.parent == RUNS:
                RUNS.rmdir()


def sweep(out: Path) -> list[str]:
    """Remove what no run can go on from; the caller holds the lock. Returns a line for each thing removed.

    That is what saves have left that were never finished, or that a later save of the same step has replaced.
    """
    for mark in out.glob(f"{MARK}*"):
        mark.unlink(missing_ok=True)
    try:
        return [f"{path} is removed: no checkpoint needs it" for path in folder_in(out).sweep()]
    except (OSError, CheckpointError):
        return []  # the next start tries again
