"""Scratch files on a disk: bytes that rest there between two uses, in files without a name, and end with the process.

A file without a name is in no folder: no other rank or job can meet it, no program takes it for a checkpoint, and the
system frees its space when the process ends, however it ends. (`O_TMPFILE`; where a file system lacks that, the file is
removed as soon as it is open, and gets its bytes after that.)

Pages that meet pages of a buffer pass the page cache (`O_DIRECT`), which is memory of the host, where the file system
can do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from sherd.errors import ScratchError, StateError
from sherd.units import in_bytes

_THREADS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OTHERWISE = "choose a folder of a disk that this user may write to"
_CURES = {
    **dict.fromkeys(_FULL, "free space, or choose a folder of a larger disk"),
    errno.EIO: "its disk has failed; continue from a checkpoint, with a folder of another disk",
    errno.ENOENT: "make the folder above it, or choose another",
    errno.EMFILE: "raise the limit of open files, ulimit -n",
}
_WAIT_BEFORE = 1  # SYNC_FILE_RANGE_WAIT_BEFORE
PAGE = mmap.PAGESIZE

Call = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


class Request:
    """A transfer that was begun. Until `wait` returns, its buffer must neither be freed nor used."""

    def __init__(self, scratch: Scratch, future: Future[None]) -> None:
        self._scratch, self._future = scratch, future

    def wait(self) -> None:
        """Return once all bytes are transferred. Raises ScratchError if they could not be."""
        self._scratch.require_owner()
        self._future.result()


class Scratch:
    """Files without names in the folder `path`, whose bytes come and go on two threads.

    The folder may hold anything, and other ranks and jobs may use it too. It is made if it is missing, and stays. Any
    thread may call the methods. In a process that is forked from this one they raise StateError. After a request that
    failed all others raise its error.

    Args:
        path: a folder of a disk, or the name of one to make in a folder that exists. `~` is the user's home.
        depth: the most requests at a time, those that are under way included; the next one waits.
        stacklevel: of warnings, from the caller's line (2) outwards.

    Attributes:
        passes_cache: pages pass the page cache.

    Raises:
        ScratchError: `path` is a file, or no file can be made there.
    """

    def __init__(self, path: str, *, depth: int = 4, stacklevel: int = 2) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        with self.explained(f"scratch folder {self.path} cannot be used"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
            with tempfile.TemporaryFile(dir=self.path, buffering=0) as file:
                self.passes_cache = _passes_cache(file.fileno())
            file_system = file_system_of(self.path)
        if file_system in ("tmpfs", "ramfs"):
            warnings.warn(
                f"scratch folder {self.path} is on {file_system}, memory of the host: choose a folder of a disk",
                stacklevel=stacklevel,
            )
        self._process = os.getpid()
        self._failure = ""
        """The text of the first error of a request."""
        self._turns = threading.Semaphore(depth)
        self._pool = ThreadPoolExecutor(_THREADS, "sherd scratch")
        self._files: list[io.FileIO] = []
        # Also when the interpreter ends, which first lets its threads finish what was begun.
        self._close = weakref.finalize(self, _close, self._pool, self._files)
        _FILES[self] = self._files

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def require(self, nbytes: int) -> None:
        """Raises ScratchError unless `nbytes` are free now; `file` reserves them."""
        with self.explained(f"scratch folder {self.path} cannot be used"):
            free = self._num_free()
        if nbytes > free:
            raise ScratchError(
                f"scratch folder {self.path}: its file system needs {in_bytes(nbytes)}, and has {in_bytes(free)} free: "
                "free space, or choose a folder of a larger disk"
            )

    def file(self, name: str, nbytes: int) -> ScratchFile:
        """Returns a file of `nbytes` zeros, whose space on the disk is reserved. Messages call it `name`.

        Raises:
            ScratchError: the space is not there, or a request has failed before.
        """
        self.require_usable()
        with self.explained(f"scratch file of {name} ({in_bytes(nbytes)}) cannot be made in {self.path}"):
            opened = tempfile.TemporaryFile(dir=self.path, buffering=0)  # noqa: SIM115
            try:
                os.posix_fallocate(opened.fileno(), 0, max(nbytes, 1))
            except BaseException:
                opened.close()
                raise
        self._files.append(opened)
        return ScratchFile(self, name, nbytes, opened)

    def close(self) -> None:
        """Wait for the requests that are under way, and free the files. Once is enough; a map stays readable."""
        self.require_owner()
        self._pool.shutdown()
        self._close()

    def forget(self, file: io.FileIO) -> None:
        if file in self._files:
            self._files.remove(file)

    def require_owner(self) -> None:
        if os.getpid() != self._process:
            raise StateError(f"scratch folder {self.path} is used in a forked process: only the one that made it may")

    def require_usable(self) -> None:
        self.require_owner()
        if not self._close.alive:
            raise StateError(f"scratch folder {self.path} is used after close()")
        self.require_no_failure()

    def require_no_failure(self) -> None:
        if self._failure:
            raise ScratchError(self._failure)

    def begin(self, transfer: Callable[[], None]) -> Future[None]:
        """Begin `transfer` on a thread, once fewer than `depth` requests are under way."""
        self.require_usable()
        self._turns.acquire()
        try:
            return self._pool.submit(self._carry_out, transfer)
        except RuntimeError as error:  # another thread closes it, or the system has no more threads
            self._turns.release()
            raise StateError(f"scratch folder {self.path} takes no request: {error}") from error

    def _carry_out(self, transfer: Callable[[], None]) -> None:
        try:
            transfer()
        except ScratchError as error:
            self._failure = self._failure or error.args[0]
            raise
        finally:
            self._turns.release()

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn an OSError into a ScratchError that says `what` cannot be done, why, and the cure."""
        try:
            yield
        except OSError as error:
            why, cure = error.strerror, _CURES.get(error.errno or 0, _OTHERWISE)
            if error.errno in _FULL:
                with contextlib.suppress(OSError):
                    why = f"{why}, {in_bytes(self._num_free())} are free"
            raise ScratchError(f"{what}: {why}; {cure}") from error

    def _num_free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


class ScratchFile:
    """`nbytes` on the disk, called `name` in messages. `Scratch.file` makes it.

    Requests on one file are carried out in the order in which they are made.
    """

    def __init__(self, scratch: Scratch, name: str, nbytes: int, opened: io.FileIO) -> None:
        self.name, self.nbytes = name, nbytes
        self._scratch, self._file = scratch, opened
        self._flags = fcntl.fcntl(opened, fcntl.F_GETFL)
        self._order = threading.Lock()
        self._last: Future[None] | None = None
        self._map: weakref.ref[mmap.mmap] | None = None

    def close(self) -> None:
        """Free the space of the file once its requests are done. A map stays readable."""
        if self._last is None:
            self._free()
        else:  # without a wait: a thread that carries one out may close the file, as it collects garbage
            self._last.add_done_callback(self._free)

    def _free(self, last: Future[None] | None = None) -> None:
        self._file.close()
        self._scratch.forget(self._file)

    def read_into(self, buffer: memoryview, start: int = 0) -> Request:
        """Begin to fill `buffer`, writable and contiguous, with the bytes from `start` on."""
        return self._begin("read", os.preadv, buffer, start)

    def write_from(self, buffer: memoryview, start: int = 0) -> Request:
        """Begin to write `buffer`, contiguous, to the bytes from `start` on."""
        return self._begin("written", os.pwritev, buffer, start)

    def map(self) -> mmap.mmap:
        """Returns the bytes as memory that the system reads when it is touched, after the requests made before.

        It shows later writes too. A disk that fails while it is touched ends the process (SIGBUS). A file of no bytes
        has one here.
        """
        self._scratch.require_usable()
        if self._last is not None:
            self._last.result()
        found = None if self._map is None else self._map()
        if found is None:
            with self._scratch.explained(f"scratch file of {self.name} in {self._scratch.path} cannot be mapped"):
                found = mmap.mmap(self._file.fileno(), max(self.nbytes, 1))
            self._map = weakref.ref(found)
        return found

    def drop(self) -> None:
        """Tell the system that the bytes need not stay in memory. They are read again when they are touched."""
        self._scratch.require_usable()
        if self._map is not None and (found := self._map()) is not None:
            found.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _begin(self, does: str, call: Call, buffer: memoryview, start: int) -> Request:
        view = memoryview(buffer).cast("B")
        assert 0 <= start <= start + len(view) <= self.nbytes, "callers stay inside of the file"
        with self._order:
            self._last = self._scratch.begin(partial(self._transfer, does, call, view, start, self._last))
            return Request(self._scratch, self._last)

    def _transfer(self, does: str, call: Call, view: memoryview, start: int, before: Future[None] | None) -> None:
        if before is not None:
            wait([before])  # it was begun before this one, and so has a thread
        self._scratch.require_no_failure()
        with self._scratch.explained(f"scratch file of {self.name} in {self._scratch.path} cannot be {does}"):
            while len(view):
                count = call(self._file.fileno(), [self._next(view, start)], start)
                if not count:
                    raise OSError(errno.EIO, f"it ends at byte {start} of {self.nbytes}")
                view, start = view[count:], start + count
            _raise_lost_writes(self._file.fileno())

    def _next(self, view: memoryview, start: int) -> memoryview:
        """Returns what to transfer next of `view`, for the bytes from `start` on. Only pages pass the page cache."""
        head, may_pass = -start % PAGE, self._scratch.passes_cache and not view.readonly
        may_pass = may_pass and len(view) >= head + PAGE
        has_pages = may_pass and (ctypes.addressof(ctypes.c_char.from_buffer(view)) + head) % PAGE == 0
        # One file has one request at a time, so that its flags are this request's.
        fcntl.fcntl(self._file, fcntl.F_SETFL, self._flags | (os.O_DIRECT if has_pages and not head else 0))
        return view[: head or len(view) - len(view) % PAGE] if has_pages else view


def file_system_of(path: str) -> str:
    """Returns the type of the file system at `path`, as `ext4`; "" where the system does not say. Raises OSError."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")  # 36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw
            if mount.split()[2] == number:
                return source.split()[0]
    return ""


def _passes_cache(fd: int) -> bool:
    """Returns whether pages of the empty file `fd` may pass the page cache."""
    try:
        os.ftruncate(fd, PAGE)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(fd, [page], 0)  # where blocks are larger than pages, it is refused only now
    except (OSError, AttributeError):  # a system without O_DIRECT
        return False
    return True


def _raise_lost_writes(fd: int) -> None:
    """Raises the OSError of bytes that the system took before, and then could not write to the disk.

    The call waits for no more than what is being written, and a later read may get other bytes without an error.
    """
    sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if sync_file_range is not None and sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_BEFORE):
        number = ctypes.get_errno()
        if number in (errno.EIO, *_FULL):
            raise OSError(number, f"{os.strerror(number)}, for bytes that were written before")


def _close(pool: ThreadPoolExecutor, files: list[io.FileIO]) -> None:
    pool.shutdown(wait=False)  # nothing is under way, and a thread of the pool may be who drops the scratch
    for file in files:
        file.close()


def _forget() -> None:
    """In a forked process: close all files, whose space would stay taken until it ends."""
    for files in list(_FILES.values()):
        for file in files:
            file.close()


_FILES: weakref.WeakKeyDictionary[Scratch, list[io.FileIO]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_forget)
