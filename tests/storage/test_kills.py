"""A checkpoint that was reported done is still there, whichever call to the system was the last of a process."""

import contextlib
import errno
import os
import sys

import pytest

from sherd.errors import StorageError
from sherd.storage.folder import Folder
from sherd.storage.places import DiskPlace
from tests.storage.writing import SMALL, read_all, save, save_into, tensors_of
from tests.support.suites import examples


class Killed(BaseException):
    """The process has ended here."""


class LastCall:
    """Counts the calls to the system; from number `last` on none is carried out.

    Args:
        last: the number of the first call that fails. A write of it carries out one half.
        error: what it raises, and all calls after it as in a process that is gone; or an OSError, once.
    """

    def __init__(self, last, error):
        self.count, self.last, self.error = 0, last, error

    def __call__(self, function, *args, half=None, **kwargs):
        self.count += 1
        lasting = isinstance(self.error, Killed)
        if self.count == self.last or (lasting and self.count > self.last):
            if half is not None and self.count == self.last:
                half()
            raise self.error
        return function(*args, **kwargs)


class File:
    """An open file whose writes are counted."""

    def __init__(self, file, calls):
        self._file, self._calls = file, calls

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def fileno(self):
        return self._file.fileno()

    def write(self, chunk):
        return self._calls(self._file.write, chunk, half=lambda: self._file.write(chunk[: len(chunk) // 2]))


@contextlib.contextmanager
def calls_end_at(last, error):
    calls = LastCall(last, error)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "replace", "unlink", "rmdir", "mkdir", "scandir", "preadv"):
            function = getattr(os, name)
            patch.setattr(os, name, lambda *a, function=function, **k: calls(function, *a, **k))
        patch.setattr("sherd.storage.places.open", lambda *a, **k: File(calls(open, *a, **k), calls), raising=False)
        yield calls


def of_seed(step, seed):
    return tensors_of(SMALL, f"{step} {seed}")


def saved(folder, step, seed, done):
    """Save a step; `done` holds what was reported as done: (step, tensors)."""
    tensors = of_seed(step, seed)
    with folder.locked(make=True):
        folder.finish(step, save(folder.folder_of(step), SMALL, tensors, step, num_files=2))
    done.append((step, tensors))


def a_life(folder, done):
    """Saves, saves of a step again, prunings and sweeps."""
    for step, seed in [(3, 0), (4, 0), (4, 1), (3, 1), (5, 0)]:
        saved(folder, step, seed, done)
        folder.prune(2, upto=step)
        folder.sweep()


def holds_what_was_done(folder, done):
    """The newest whole one is at least as new as what was reported done, and reads as one of its saves wrote it."""
    found, _ = folder.newest()
    if not done:
        assert found is None or read_all(found.place) in [of_seed(found.step, seed) for seed in (0, 1)]
        return
    assert found is not None
    assert found.step >= max(step for step, _ in done)
    reported = [tensors for step, tensors in done if step == found.step]
    now = read_all(found.place)
    # The save that was cut short may have got its manifest written; else it is the last that was reported.
    assert now in [of_seed(found.step, seed) for seed in (0, 1)]
    if reported and now != reported[-1]:
        assert now == of_seed(found.step, 1)


@pytest.fixture
def disk_at_once(monkeypatch):
    """What is flushed is not waited for: no test can take the power away, and thousands of flushes take minutes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def number_of_calls(path):
    with calls_end_at(sys.maxsize, Killed()) as calls:
        a_life(Folder(DiskPlace(path)), [])
    return calls.count


ERRORS = [Killed(), OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")]


@pytest.mark.parametrize("error", ERRORS, ids=["killed", "no space", "input/output error"])
def test_whichever_call_is_the_last_what_was_reported_done_is_there(tmp_path, error, disk_at_once):
    total = number_of_calls(tmp_path / "counted")
    assert total > 100
    for last in range(1, total + 1, total // examples(total if isinstance(error, Killed) else total // 3)):
        folder, done = Folder(DiskPlace(tmp_path / str(last))), []
        with contextlib.suppress(Killed, OSError, StorageError), calls_end_at(last, error):
            a_life(folder, done)
        holds_what_was_done(folder, done)
        # And whoever comes after it saves, prunes and sweeps as if nothing had been.
        saved(folder, 6, 0, done)
        folder.prune(1, upto=6)
        folder.sweep()
        holds_what_was_done(folder, done)
        found, passed_over = folder.newest()
        assert (found.step, passed_over) == (6, [])
        left = {name for step in folder.steps() for name in folder.folder_of(step).names()}
        assert not [name for name in left if name.endswith(".part")]


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    folder = Folder(DiskPlace(tmp_path))
    tensors = save_into(folder, 1)

    def full():
        yield memoryview(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.folder_of(2).write("ab-00000.safetensors", full)
    assert folder.folder_of(2).names() == []
    found, _ = folder.newest()
    assert read_all(found.place) == tensors
