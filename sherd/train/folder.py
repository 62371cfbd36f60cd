"""The folders of runs: runs/1, runs/2, ... unless the user names another. One run at a time writes into a folder.

Who writes holds a lock (flock) on OUT/.lock, which says who it is. The system drops the lock when all processes that
hold it have ended, however they end; the file stays. On shared file systems it holds as far as their flock goes: NFS
and Lustre mounted with `flock` have it for all machines, others for the processes of one machine, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from dataclasses import replace
from pathlib import Path

from sherd.errors import CheckpointError
from sherd.storage.folder import Folder
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import PART, mode_of
from sherd.train.config import Config, InputError
from sherd.train.saved import CHECKPOINTS, Checkpoint, NoCheckpoint, newest, newest_in, place_in, read_best, whole

__all__ = ["RunFolder", "claim", "is_free", "last_run", "pick", "sweep"]

RUNS = Path("runs")
LOCK = ".lock"
HELD = "SHERD_LOCK"  # in a rank's environment: the descriptor that holds the launcher's lock
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_METRICS_OF_A_START = 1 << 16  # bytes; more than the record of a run's start ever has


def _runs() -> list[int]:
    return sorted(int(path.name) for path in RUNS.glob("*") if path.name.isdigit())


def last_run() -> Path:
    """Returns the newest numbered run that has a checkpoint. Raises NoCheckpoint where none has."""
    for number in reversed(_runs()):
        try:
            newest(out := RUNS / str(number))
            return out
        except NoCheckpoint:
            continue
    found = "no run with a checkpoint" if _runs() else "no run"
    raise NoCheckpoint(f"there is {found} under {RUNS.absolute()} to resume; name one with --out")


class RunFolder:
    """The folder of a run, locked until `close`."""

    def __init__(self, path: Path, lock: int, made: bool) -> None:
        self.path, self.lock, self.made = path, lock, made

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write."""
        os.close(self.lock)

    def drop_if_empty(self) -> None:
        """Remove the folder, if this run has made it and nothing of worth has come into it; and `runs`, if empty."""
        with contextlib.suppress(OSError, InputError):  # it cannot be read, or other runs are there
            if self.made and is_free(self.path):
                _remove(self.path)
                if self.path.parent == RUNS:
                    RUNS.rmdir()


def claim(config: Config) -> RunFolder:
    """The run's folder, made if need be, locked, and surely writable.

    Raises:
        InputError: it cannot be written, or another process writes into it.
    """
    named, held = Path(config.run.out), os.environ.get(HELD)
    if held and config.run.out and _holds(int(held), named):
        return _introduced(named, int(held), made=False)
    try:
        folder = _locked(named, _made(named)) if config.run.out else _numbered()
        probe = folder.path / ".writable"  # a lock file from before says nothing of the folder
        probe.touch()
        probe.unlink()
        return folder
    except OSError as error:
        where = named if config.run.out else RUNS.absolute()
        raise InputError(f"cannot write to {where}: {error.strerror}; choose another --out") from error


def _made(out: Path) -> bool:
    """Make the folder `out`; returns whether it was not there."""
    was_there = mode_of(out)
    out.mkdir(parents=True, exist_ok=True)
    return not was_there


def _numbered() -> RunFolder:
    """A new folder; what starts that were killed have left of theirs is dropped."""
    before = _runs()
    for number in range((before or [0])[-1] + 1, 1 << 62):
        out = RUNS / str(number)
        try:
            out.mkdir(parents=True)
            folder = _locked(out, made=True)
        except (FileExistsError, FileNotFoundError, InputError):
            continue  # another start was quicker, or sweeps
        for old in before:
            _drop_what_a_start_left(RUNS / str(old))
        return folder
    raise AssertionError("there are more numbers than folders")


def _drop_what_a_start_left(out: Path) -> None:
    with contextlib.suppress(InputError, OSError):  # it is starting now, or cannot be read
        if mode_of(out / LOCK) and is_free(out):
            with _locked(out, made=True) as folder:
                folder.drop_if_empty()


def _locked(out: Path, made: bool) -> RunFolder:
    """Raises InputError when another process holds the lock."""
    lock = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            who = _holder(lock)
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise InputError(
                f"{out} is in use by {who}; wait for its end or stop it, or choose another --out"
            ) from None
    if not _holds(lock, out):  # who held it has removed the folder meanwhile
        os.close(lock)
        return _locked(out, _made(out) or made)
    return _introduced(out, lock, made)


def _holds(lock: int, out: Path) -> bool:
    """Returns whether the descriptor `lock` is of the lock file that `out` has now."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(out / LOCK))
    except OSError:
        return False


def _introduced(out: Path, lock: int, made: bool) -> RunFolder:
    """Write down who holds the lock."""
    os.set_inheritable(lock, False)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    who = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
    os.pwrite(lock, who.ljust(256), 0)
    return RunFolder(out, lock, made)


def _holder(lock: int) -> str:
    try:
        who = json.loads(os.pread(lock, 4096, 0))
        return f"process {who['process']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_free(out: Path) -> bool:
    """Returns whether a run can start in `out`: it is not there, or holds nothing but what a start leaves.

    That is the lock, marks, checkpoints never finished, the name of the place for checkpoints, and metrics without a
    step. Raises InputError if it cannot be read now.
    """
    try:
        mode = mode_of(out)
        return not mode or (stat.S_ISDIR(mode) and all(_is_of_a_start(path) for path in out.iterdir()))
    except OSError as error:
        raise InputError(f"{out} cannot be read: {error}; choose another --out") from error


def _is_of_a_start(path: Path) -> bool:
    if path.name == CHECKPOINTS:
        return stat.S_ISREG(mode_of(path)) or all(_was_never_finished(each) for each in path.iterdir())
    if path.name == "metrics.jsonl":
        return path.stat().st_size < _METRICS_OF_A_START and '"event": "step"' not in path.read_text(errors="replace")
    return path.name == LOCK or path.name.startswith(".seen-")


def _was_never_finished(path: Path) -> bool:
    return path.name == LOCK or (path.name.startswith("step-") and not mode_of(path / MANIFEST))


def _remove(out: Path) -> None:
    """Remove a free folder, its lock last; what has come into it meanwhile stays."""
    try:
        for path in sorted(out.iterdir(), key=lambda path: path.name == LOCK):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        out.rmdir()
    except OSError:
        pass


def sweep(out: Path) -> list[str]:
    """Remove what nobody can go on from; the caller holds the lock. Returns a line for each thing removed.

    That is what saves have left that were never finished, or that a later save of the same step has replaced.
    """
    for mark in (*out.glob(".seen-*"), *out.glob(f"{CHECKPOINTS}/best.json.*{PART}")):
        mark.unlink(missing_ok=True)
    try:
        swept = Folder(place_in(out)).sweep()
    except (OSError, CheckpointError):
        return []  # the next start tries again
    return [f"{path} is removed: no checkpoint needs it" for path in swept]


# The checkpoint that a user means


def pick(run: str | None, best: bool) -> Checkpoint:
    """Returns the checkpoint that `run` names.

    `run` is a run's folder, the folder or URL of its checkpoints, or one checkpoint; None is the last run of all.

    Raises:
        InputError: there is none.
    """
    named = str(_last()) if run is None else run
    is_url = "://" in named
    if not is_url and not Path(named).is_dir():
        raise InputError(f"{named} is no folder; name a run's, as in runs/1, or a checkpoint's")
    place = place_in(Path(), named)
    try:
        names = place.names()
    except OSError as error:
        raise InputError(f"{named} cannot be read: {error}") from error
    if MANIFEST in names or Path(named).name.startswith("step-"):
        if best:
            raise InputError(f"--best chooses among a run's checkpoints, but {named} is one; name the run's folder")
        return whole(place)
    if not is_url and not any(name.startswith("step-") for name in names):
        place = place_in(Path(named))
    found, notes = newest_in(place)
    if found is None:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise InputError(f"{named} holds no checkpoint{why}; name a run's folder, or a checkpoint's")
    if not best:
        return found
    try:
        named_best = read_best(place)
    except OSError as error:
        raise InputError(f"the best of {named} cannot be read: {error}") from error
    if named_best is None:
        raise InputError(
            f"{named} has kept no best checkpoint: run.keep_best or run.save_every was off, or nothing was judged "
            "yet; leave out --best"
        )
    return replace(whole(Folder(place).folder_of(named_best.step)), folder=place)


def _last() -> Path:
    try:
        return last_run()
    except NoCheckpoint as error:
        raise InputError(f"there is no run under {Path('runs').absolute()}; name a run's folder") from error
