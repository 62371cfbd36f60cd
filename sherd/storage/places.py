"""Places: folders that hold checkpoints, on a disk or in an object store.

Whatever is written is whole or not there: it is written aside, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

Chunks = Callable[[], Iterable[memoryview]]
"""Returns the bytes of a file from its begin, one chunk after the other; called once more where a write is repeated."""


class Readable(ABC):
    """An open file."""

    name: str
    nbytes: int

    @abstractmethod
    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises EOFError if there are fewer, OSError if it fails."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


class Place(ABC):
    """A folder. Names in it are those of its files and folders, without a path."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns the path or URL, as a user would write it."""

    @abstractmethod
    def below(self, name: str) -> Place:
        """Returns the folder `name` in this one, which need not exist."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all files and folders here; none if this folder does not exist."""

    @abstractmethod
    def write(self, name: str, chunks: Chunks) -> None:
        """Write a file, which is flushed to the disk when this returns, and replaces one of that name at once."""

    @abstractmethod
    def open(self, name: str) -> Readable:
        """Returns the file `name`, open. Raises OSError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove the file `name`, if it is there."""

    @abstractmethod
    def drop(self) -> None:
        """Remove this folder and all that is in it."""

    def read(self, name: str) -> bytes:
        """Returns all of a file. Raises OSError."""
        file = self.open(name)
        try:
            found = bytearray(file.nbytes)
            file.read_into(0, memoryview(found))
            return bytes(found)
        finally:
            file.close()


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
        """Returns the names of all files and folders here."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def write(self, name: str, chunks: Chunks) -> None:
        """Write `name.part`, flush it, rename it, and flush the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        final, part = self.path / name, self.path / f"{name}.part"
        try:
            with open(part, "wb", buffering=0) as file:
                for chunk in chunks():
                    while len(chunk):
                        chunk = chunk[file.write(chunk) :]
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
        """Remove this folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class _DiskFile(Readable):
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._fd = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, start: int, into: memoryview) -> None:
        while len(into):
            count = os.preadv(self._fd, [into], start)
            if not count:
                raise EOFError
            start, into = start + count, into[count:]

    def close(self) -> None:
        os.close(self._fd)


def flush(folder: Path) -> None:
    """Have the names in `folder` reach the disk, where its file system can be told so."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def place_of(path: str | os.PathLike[str]) -> Place:
    """Returns the folder at `path`."""
    return Disk(Path(path))
