"""The interface of places: folders of checkpoints, whose files are written as a whole, read in parts, and removed."""

from __future__ import annotations

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from sherd.errors import CheckpointError, StorageError

Chunks = Callable[[], Iterable[memoryview]]
"""Returns the bytes of a file from its begin, one chunk after the other; called once more where a write is repeated."""

PART = ".part"
"""How the names of files end that are not written to their end, or never were."""


class Lock(enum.Enum):
    """The outcome of asking for the lock of a folder."""

    HELD = "held"
    BUSY = "busy"
    """Somebody else holds it."""
    NONE = "none"
    """There is no such lock in this place: a file system without flock, a folder that is missing or cannot be written,
    an object store."""


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


def says_absent(error: OSError) -> bool:
    """Returns whether a file is not there, or is no file. After any other error it may be there, and whole."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)


def unreadable(what: str, error: OSError | EOFError) -> CheckpointError:
    """Returns the error for `what` could not be read: a StorageError, unless the file is not there or ends early."""
    kind = StorageError if isinstance(error, OSError) and not says_absent(error) else CheckpointError
    return kind(f"{what}: {getattr(error, 'strerror', None) or str(error) or 'it ends'}")


def read_exactly(file: Readable, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of `file` from `start` on. Raises CheckpointError if that fails."""
    try:
        file.read_into(start, into)
    except (OSError, EOFError) as error:
        raise unreadable(f"{file.name} cannot be read at byte {start}", error) from error


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
        """Returns the names of all files and folders here, symbolic links left out; none if this folder is missing."""

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
        """Remove this folder, if it is empty."""

    @contextlib.contextmanager
    def locked(self, *, shared: bool, make: bool = False) -> Iterator[Lock]:
        """Hold the lock of this folder: many `shared` ones, or one that is not. A shared one is waited for.

        Args:
            shared: others may hold it, too.
            make: make the folder if it is not there.
        """
        yield Lock.NONE

    def read(self, name: str) -> bytes:
        """Returns all of a file. Raises OSError."""
        file = self.open(name)
        try:
            found = bytearray(file.nbytes)
            file.read_into(0, memoryview(found))
            return bytes(found)
        finally:
            file.close()
