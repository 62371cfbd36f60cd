"""Places: folders that hold checkpoints, on a disk; those in object stores are of `sherd/storage/remote.py`.

Whatever is written is whole or not there: it is written aside, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from sherd.errors import CheckpointError, StorageError
from sherd.storage.place import PART, Chunks, Lock, Place, Readable, read_exactly
from sherd.storage.remote import Remote

__all__ = ["PART", "Chunks", "Disk", "Lock", "Place", "Readable", "place_of"]

LOCK = ".lock"
LOCK_LIMIT_S = 30
"""A shared lock is waited for so long: whoever holds it alone removes files, and reads nothing."""
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EARLY_BYTES = 16 << 20
"""After as many bytes the system is told to begin writing them to the disk, while the next ones are handed over."""


class Disk(Place):
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> Disk:
        """Returns the folder `name` in this one."""
        return Disk(self.path / name)

    def names(self) -> list[str]:
        """Returns the names of all files and folders here, without symbolic links."""
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if not entry.is_symlink()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, name: str, chunks: Chunks) -> None:
        """Write the file under another name, flush it, rename it, and flush the folder."""
        _make(self.path)
        # Two jobs may write one name at once: each has a part of its own, and the last to rename it has its way.
        final, part = self.path / name, self.path / f"{name}.{secrets.token_hex(4)}{PART}"
        try:
            with open(part, "xb", buffering=0) as file:
                written = begun = 0
                for chunk in chunks():
                    while len(chunk):
                        count = file.write(chunk)
                        chunk, written = chunk[count:], written + count
                    if written - begun >= _EARLY_BYTES:
                        _begin_writing(file.fileno(), begun, written - begun)
                        begun = written
                os.fsync(file.fileno())
            os.replace(part, final)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()  # its space is needed
            raise
        flush(self.path)

    def open(self, name: str) -> Readable:
        """Returns the file `name`, open."""
        return _DiskFile(self.path / name)

    def remove(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove this folder, if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @contextlib.contextmanager
    def locked(self, *, shared: bool, make: bool = False) -> Iterator[Lock]:
        """Hold a flock on the file `.lock` here."""
        if make:
            _make(self.path)
        fd = _lock_file(self.path / LOCK, _NOT_WRITABLE if make else _NOT_WRITABLE + _FULL)
        if fd is None:
            yield Lock.NONE
            return
        try:
            found = _flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            until = time.monotonic() + LOCK_LIMIT_S
            while shared and found is Lock.BUSY:
                if time.monotonic() > until:
                    raise StorageError(
                        f"{self.path / LOCK} has been locked for {LOCK_LIMIT_S} s by {_holder_of(fd)}: nothing can be "
                        "saved or loaded here; wait until it is done, or end it"
                    )
                time.sleep(0.05)
                found = _flock(fd, fcntl.LOCK_SH)
            try:
                yield found
            finally:
                if found is Lock.HELD:
                    with contextlib.suppress(OSError):
                        fcntl.flock(fd, fcntl.LOCK_UN)  # or a process forked meanwhile would hold it on
        finally:
            os.close(fd)


class _DiskFile(Readable):
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of this name must not hold us up
        self._close = weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self._close()
            raise IsADirectoryError(errno.EISDIR, "it is no file", self.name)
        self.nbytes = found.st_size

    def read_into(self, start: int, into: memoryview) -> None:
        while len(into):
            count = os.preadv(self._fd, [into], start)
            if not count:
                raise EOFError
            start, into = start + count, into[count:]

    def close(self) -> None:
        self._close()


def read_file(path: Path, most_bytes: int = 256 << 20) -> bytes:
    """Returns what the file at `path` holds.

    Raises:
        CheckpointError: it has more than `most_bytes`.
        OSError: it cannot be read, or is a pipe, a device or a folder.
    """
    with contextlib.closing(_DiskFile(path)) as file:
        if file.nbytes > most_bytes:
            raise CheckpointError(f"{path} has {file.nbytes} bytes")
        found = bytearray(file.nbytes)
        read_exactly(file, 0, memoryview(found))
    return bytes(found)


def _make(folder: Path) -> None:
    """Make `folder`, whose name reaches the disk, too."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(folder: Path) -> None:
    """Have the names in `folder` reach the disk, where its file system can be told so."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _begin_writing(fd: int, start: int, nbytes: int) -> None:
    """Have the system write these bytes to the disk, without waiting for them, where it can be told so."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(2))  # SYNC_FILE_RANGE_WRITE


def _lock_file(path: Path, lacking: tuple[int, ...]) -> int | None:
    """Returns the lock's file, open; None if it is not there, and cannot be made for one of the reasons `lacking`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in lacking:
            raise
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _holder_of(fd: int) -> str:
    """Returns who holds the lock of an open file, as far as this machine's kernel says it."""
    inode = os.fstat(fd).st_ino
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                name = Path(f"/proc/{words[4]}/comm").read_text().strip()
                return f"process {words[4]} ({name})"
    return "a process that this machine does not know"


def _flock(fd: int, how: int) -> Lock:
    """Ask for a lock, without waiting for it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.BUSY
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return Lock.NONE
    return Lock.HELD


def place_of(path: str | os.PathLike[str], **options: object) -> Place:
    """Returns the folder at `path`: of a file system, or a URL that fsspec knows (`s3://bucket/folder`).

    Args:
        path: the path or URL.
        options: what fsspec is given for a URL, `endpoint_url` say. Without, credentials come from the environment.

    Raises:
        CheckpointError: the package for this kind of URL is missing, or refuses the options.
    """
    text = os.fspath(path)
    kind, is_url, rest = text.partition("://")
    if is_url and kind not in ("file", "local"):
        return Remote.of(text, options)
    if options:
        raise CheckpointError(f"{text} is on a disk, which takes no options: {', '.join(options)}")
    return Disk(Path(rest if is_url else text))
