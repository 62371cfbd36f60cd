"""Places: the folders that hold checkpoints, on a disk or in an object store.

A file in a place is complete or absent. On a disk, it is written under another name, flushed, and renamed. In an object
store, an object appears when its upload completes.

fsspec, and its package for a store, are imported at the first use of a URL.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import os
import secrets
import stat
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sherd.errors import CheckpointError, StorageError

T = TypeVar("T")

Chunks = Callable[[], Iterable[memoryview]]
"""Returns the bytes of a file from the start, in chunks. A repeated write calls it again."""

PART = ".part"
"""The end of the name of a file that is still being written, or that a killed process left unfinished."""


class Lock(enum.Enum):
    """The answer to a request for a folder's lock."""

    HELD = "held"
    BUSY = "busy"
    """Another process holds the lock."""
    NONE = "none"
    """The place has no lock: an object store, a file system without flock, or a folder that is missing or read-only."""


class Readable(ABC):
    name: str
    nbytes: int

    @abstractmethod
    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises EOFError if there are fewer, OSError if it fails."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class Place(ABC):
    """A folder. Its methods take names of files and folders directly in it, without a path."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns the path or URL, as a user would write it."""

    @abstractmethod
    def below(self, name: str) -> Place:
        """Returns the folder `name` in this one, which need not exist."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all files and folders in it, without symbolic links; [] if the folder is missing."""

    @abstractmethod
    def write(self, name: str, chunks: Chunks) -> None:
        """Write a file durably, and replace an existing file of that name in one step. Raises OSError."""

    @abstractmethod
    def open(self, name: str) -> Readable:
        """Returns the file `name`, open. Raises OSError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove the file `name`, if it exists."""

    @abstractmethod
    def drop(self) -> None:
        """Remove this folder, if it is empty."""

    @contextlib.contextmanager
    def locked(self, *, shared: bool, make: bool = False) -> Iterator[Lock]:
        """Hold the lock of this folder, which `make` creates; yield the outcome. Only a shared lock is waited for."""
        yield Lock.NONE


def mode_of(path: Path) -> int:
    """Returns the mode of the file or folder at `path`; 0: there is none. Raises OSError if it cannot be told now."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        nearest = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
        if not nearest.exists():
            raise OSError(errno.ENXIO, "this link leads to nothing; mount its storage", str(nearest)) from None
        return 0


def says_absent(error: OSError) -> bool:
    """Returns True if the error means that there is no such file. After any other error the file may be intact."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)


def unreadable(message: str, error: OSError | EOFError) -> CheckpointError:
    """Returns the error for a failed read: a StorageError, but a CheckpointError if the file is absent or too short."""
    error_class = StorageError if isinstance(error, OSError) and not says_absent(error) else CheckpointError
    return error_class(f"{message}: {getattr(error, 'strerror', None) or str(error) or 'it ends'}")


def read_exactly(file: Readable, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of `file` from `start` on. Raises CheckpointError if that fails."""
    try:
        file.read_into(start, into)
    except (OSError, EOFError) as error:
        raise unreadable(f"{file.name} cannot be read at byte {start}", error) from error


def place_of(path: str | os.PathLike[str], **options: object) -> Place:
    """Returns the folder at `path`: of a file system, or a URL that fsspec knows (`s3://bucket/folder`).

    Args:
        path: the path or URL.
        options: arguments of fsspec's file system for a URL, such as `endpoint_url`. Credentials come from the
            environment by default.

    Raises:
        CheckpointError: the package for this kind of URL is missing, or refuses the options.
    """
    text = os.fspath(path)
    scheme, is_url, rest = text.partition("://")
    if is_url and scheme not in ("file", "local"):
        return Remote.of(text, options)
    if options:
        raise CheckpointError(f"{text} is on a disk, which takes no options: {', '.join(options)}")
    return DiskPlace(Path(rest if is_url else text))


# Folders of a disk

LOCK = ".lock"
LOCK_LIMIT_S = 30
"""The longest wait for a shared lock. An exclusive holder only removes files, which takes less."""
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EARLY_BYTES = 16 << 20
"""A write starts the disk's own writing each time it has handed over this many bytes."""


class DiskPlace(Place):
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> DiskPlace:
        return DiskPlace(self.path / name)

    def names(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if not entry.is_symlink()]
        except (FileNotFoundError, NotADirectoryError):
            mode_of(self.path)
            return []

    def write(self, name: str, chunks: Chunks) -> None:
        """Write the file under another name, flush it, rename it, and flush the folder."""
        _make(self.path)
        # Two jobs may write one name at the same time. Each has a part of its own, and the last rename wins.
        final, part = self.path / name, self.path / f"{name}.{secrets.token_hex(4)}{PART}"
        try:
            with open(part, "xb", buffering=0) as file:
                written = begun = 0
                for chunk in chunks():
                    while len(chunk):
                        count = file.write(chunk)
                        chunk, written = chunk[count:], written + count
                    if written - begun >= _EARLY_BYTES:
                        # The disk works while the next chunks are handed over, and fsync has less left to wait for.
                        _begin_writing(file.fileno(), begun, written - begun)
                        begun = written
                os.fsync(file.fileno())
            os.replace(part, final)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()  # a full disk needs the space
            raise
        flush(self.path)

    def open(self, name: str) -> Readable:
        return _DiskFile(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @contextlib.contextmanager
    def locked(self, *, shared: bool, make: bool = False) -> Iterator[Lock]:
        """Hold a flock on the file `.lock` in this folder."""
        if make:
            _make(self.path)
        fd = _lock_file(self.path / LOCK, _NOT_WRITABLE if make else _NOT_WRITABLE + _FULL)
        if fd is None:
            yield Lock.NONE
            return
        try:
            lock = _flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            deadline = time.monotonic() + LOCK_LIMIT_S
            while shared and lock is Lock.BUSY:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{self.path / LOCK} has been locked for {LOCK_LIMIT_S} s by {_holder_of(fd)}: nothing can be "
                        "saved or loaded here; wait until it is done, or end it"
                    )
                time.sleep(0.05)
                lock = _flock(fd, fcntl.LOCK_SH)
            try:
                yield lock
            finally:
                if lock is Lock.HELD:
                    with contextlib.suppress(OSError):
                        # A process forked under the lock shares the descriptor, so closing ours would not unlock.
                        fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


class _DiskFile(Readable):
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe of this name must not block
        self._close = weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self._close()
            raise IsADirectoryError(errno.EISDIR, "it is no file", self.name)
        self.nbytes = status.st_size

    def read_into(self, start: int, into: memoryview) -> None:
        while len(into):
            count = os.preadv(self._fd, [into], start)
            if not count:
                raise EOFError
            start, into = start + count, into[count:]

    def close(self) -> None:
        self._close()


def read_file(path: Path, most_bytes: int = 256 << 20) -> bytes:
    """Returns the content of the file at `path`.

    Raises:
        CheckpointError: it has more than `most_bytes`.
        OSError: it cannot be read, or is a pipe, a device or a folder.
    """
    with contextlib.closing(_DiskFile(path)) as file:
        if file.nbytes > most_bytes:
            raise CheckpointError(f"{path} has {file.nbytes} bytes")
        content = bytearray(file.nbytes)
        read_exactly(file, 0, memoryview(content))
    return bytes(content)


def _make(folder: Path) -> None:
    """Make `folder` and the folders above it. Their names reach the disk, too."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(folder: Path) -> None:
    """Flush the names in `folder` to the disk, if its file system can flush folders."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _begin_writing(fd: int, start: int, nbytes: int) -> None:
    """Start writing these bytes to the disk without waiting for them, if the system has a call for that."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(2))  # SYNC_FILE_RANGE_WRITE


def _lock_file(path: Path, excused: tuple[int, ...]) -> int | None:
    """Returns the lock's file, open; None if it is missing and cannot be made for one of the reasons `excused`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in excused:
            raise
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _holder_of(fd: int) -> str:
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


# Folders of object stores, and of any other file system of fsspec

ATTEMPTS = 4
"""The attempts at one operation. The store's package may make several requests in each."""
FIRST_PAUSE = 0.5
"""The seconds before the second attempt; each pause is twice the one before."""
PART_BYTES = 32 << 20
"""A longer object is uploaded in parts of this size: S3 takes parts from 5 MiB on, and 10,000 of them."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_FOR_GOOD = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    NotImplementedError: errno.ENOTSUP,
    TypeError: errno.EINVAL,
    ValueError: errno.EINVAL,
}
"""Errors that another attempt would not change, and their numbers."""


class Remote(Place):
    """The folder `url` of a file system of fsspec, which calls it `path`, and must not keep listings."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._path, self._url = fs, path, url

    @classmethod
    def of(cls, url: str, options: Mapping[str, object]) -> Remote:
        """Returns the folder at `url`. Raises CheckpointError if a package is missing or refuses the arguments."""
        url = url.rstrip("/")
        package = _PACKAGES.get(url.partition("://")[0], "and fsspec's package for it")
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}; install it with: pip install fsspec {package}") from error
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened: {type(error).__name__}: {error}") from error
        return cls(fs, path.rstrip("/"), url)

    def __str__(self) -> str:
        return self._url

    def below(self, name: str) -> Remote:
        return Remote(self._fs, f"{self._path}/{name}", f"{self._url}/{name}")

    def names(self) -> list[str]:
        try:
            listed = [path.strip("/") for path in self._tried(lambda: self._fs.ls(self._path, detail=False))]
        except FileNotFoundError:
            return []
        return [path.rpartition("/")[2] for path in listed if path != self._path.strip("/")]

    def write(self, name: str, chunks: Chunks) -> None:
        """Upload an object. A failed attempt leaves nothing, and the next attempt calls `chunks` again.

        Raises:
            OSError: all attempts failed. An error of `chunks` is raised as it is, after one attempt.
        """
        source = _Source(chunks)
        try:
            self._tried(lambda: self._upload(f"{self._path}/{name}", source), name, source)
        except OSError:
            if source.error is not None:
                raise source.error from None
            raise

    def _upload(self, path: str, chunks: Iterable[memoryview]) -> None:
        if self._is_object_store():  # an upload becomes visible when it completes
            file = self._fs.open(path, "wb", block_size=PART_BYTES)
            try:
                _fill(file, chunks)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True  # else its finalizer would complete the upload
                raise
            return
        self._fs.makedirs(self._path, exist_ok=True)
        part = f"{path}.{secrets.token_hex(4)}{PART}"
        try:
            with self._fs.open(part, "wb") as file:
                _fill(file, chunks)
            self._fs.mv(part, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(part)
            raise

    def open(self, name: str) -> Readable:
        path, url = f"{self._path}/{name}", f"{self._url}/{name}"
        info = self._tried(lambda: self._fs.info(path), name)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", url)

        def request(start: int, stop: int) -> bytes:
            return self._tried(lambda: bytes(self._fs.cat_file(path, start=start, end=stop)), name)

        return _Object(url, int(info["size"]), request)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._tried(lambda: self._fs.rm_file(f"{self._path}/{name}"), name)

    def drop(self) -> None:
        """Remove this folder, if it is empty. A folder of an object store ends with its last object."""
        with contextlib.suppress(Exception):
            if not self._is_object_store() and not self.names():
                self._fs.rmdir(self._path)

    def _is_object_store(self) -> bool:
        from fsspec.asyn import AsyncFileSystem

        return isinstance(self._fs, AsyncFileSystem)

    def _tried(self, action: Callable[[], T], name: str = "", source: _Source | None = None) -> T:
        """Returns the result of `action`, tried `ATTEMPTS` times. Raises OSError with the URL and the last cause."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:
                number = next((code for of, code in _FOR_GOOD.items() if isinstance(error, of)), None)
                if number is None and attempt < ATTEMPTS and (source is None or source.error is None):
                    time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
                    continue
                text = f"{type(error).__name__}: {error}{f', tried {attempt} times' if attempt > 1 else ''}"
                number = number or getattr(error, "errno", None) or errno.EIO
                raise OSError(number, text, f"{self._url}/{name}".rstrip("/")) from error
        raise AssertionError("each attempt returns, raises or goes on")


class _Source:
    """The chunks of a file, read again by each attempt; `error` is the error that they raised themselves."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[memoryview]:
        try:
            yield from self._chunks()
        except Exception as error:
            self.error = error
            raise


class _Object(Readable):
    def __init__(self, name: str, nbytes: int, request: Callable[[int, int], bytes]) -> None:
        self.name, self.nbytes, self._request = name, nbytes, request

    def read_into(self, start: int, into: memoryview) -> None:
        if len(into):
            stop = start + len(into)
            content = self._request(start, stop) if stop <= self.nbytes else b""
            if len(content) != len(into):
                raise EOFError
            into[:] = content

    def close(self) -> None:
        pass


def _fill(file: Any, chunks: Iterable[memoryview]) -> None:
    for chunk in chunks:
        for start in range(0, len(chunk), PART_BYTES):
            file.write(chunk[start : start + PART_BYTES])
