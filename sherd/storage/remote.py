"""Object stores, and whatever else fsspec has a file system for: `s3://bucket/folder`, `gs://`, `abfs://`, `memory://`.

fsspec, and its package for the store, are imported when a URL is first used. An object appears with its last byte, or
not at all. What fails in passing is tried again; what fails for good is an OSError that names the URL.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from sherd.errors import CheckpointError
from sherd.storage.places import PART, Chunks, Place, Readable

T = TypeVar("T")

ATTEMPTS = 4
"""How often something is tried, beyond what the store's package tries by itself."""
FIRST_PAUSE = 0.5
"""The seconds before the second attempt; each pause is twice the one before."""
PART_BYTES = 32 << 20
"""An object that is longer is uploaded in parts of this size: S3 takes parts from 5 MiB on, and 10,000 of them."""
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
    """A folder of a file system of fsspec.

    Args:
        fs: the file system, which must not keep listings.
        path: the folder, as `fs` names it.
        url: the folder, as a user names it.
    """

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._path, self._url = fs, path, url

    @classmethod
    def of(cls, url: str, options: Mapping[str, object]) -> Remote:
        """Returns the folder at `url`; `options` are those of fsspec's file system for it.

        Raises:
            CheckpointError: a package is missing, or refuses the URL or the options.
        """
        url = url.rstrip("/")
        package = _PACKAGES.get(url.partition("://")[0], "and fsspec's package for it")
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}; install it with: pip install fsspec {package}") from error
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened: {_told(error)}") from error
        return cls(fs, path.rstrip("/"), url)

    def __str__(self) -> str:
        return self._url

    def below(self, name: str) -> Remote:
        """Returns the folder `name` in this one."""
        return Remote(self._fs, f"{self._path}/{name}", f"{self._url}/{name}")

    def names(self) -> list[str]:
        """Returns the names of all objects and folders here, as the store has them now."""
        try:
            paths = self.tried(lambda: self._fs.ls(self._path, detail=False))
        except FileNotFoundError:
            return []
        here = self._path.strip("/")
        return [path.strip("/").rpartition("/")[2] for path in paths if path.strip("/") != here]

    def write(self, name: str, chunks: Chunks) -> None:
        """Upload an object. An attempt that fails leaves nothing, and the next one asks for `chunks` anew.

        Raises:
            OSError: no attempt went well. What `chunks` raises is raised as it is.
        """
        source = _Source(chunks)
        try:
            self.tried(lambda: self._upload(f"{self._path}/{name}", source), name, source)
        except OSError:
            if source.error is not None:
                raise source.error from None
            raise

    def _upload(self, path: str, chunks: Iterable[memoryview]) -> None:
        from fsspec.asyn import AsyncFileSystem

        if isinstance(self._fs, AsyncFileSystem):  # an object store, which shows an upload when it is complete
            file = self._fs.open(path, "wb", block_size=PART_BYTES)
            try:
                _fill(file, chunks)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True  # or its finalizer would complete the upload
                raise
            return
        self._fs.makedirs(self._path, exist_ok=True)
        try:
            with self._fs.open(path + PART, "wb") as file:
                _fill(file, chunks)
            self._fs.mv(path + PART, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(path + PART)
            raise

    def open(self, name: str) -> Readable:
        """Returns the object `name`. Raises OSError."""
        info = self.tried(lambda: self._fs.info(f"{self._path}/{name}"), name)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", f"{self._url}/{name}")
        path = f"{self._path}/{name}"
        return _Object(
            f"{self._url}/{name}",
            int(info["size"]),
            lambda start, stop: self.tried(lambda: self._fs.cat_file(path, start=start, end=stop), name),
        )

    def remove(self, name: str) -> None:
        """Remove the object `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.tried(lambda: self._fs.rm_file(f"{self._path}/{name}"), name)

    def drop(self) -> None:
        """Remove this folder, if it is empty. In an object store it ends with its last object."""
        with contextlib.suppress(Exception):
            if not self.names():
                self._fs.rmdir(self._path)

    def tried(self, action: Callable[[], T], name: str = "", source: _Source | None = None) -> T:
        """Returns what `action` does, which is tried up to `ATTEMPTS` times.

        Raises:
            OSError: no attempt went well; it names the URL and the last cause.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:
                number = next((_FOR_GOOD[kind] for kind in _FOR_GOOD if isinstance(error, kind)), None)
                if number is None and attempt < ATTEMPTS and (source is None or source.error is None):
                    time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
                    continue
                told = f"{_told(error)}{f', tried {attempt} times' if attempt > 1 else ''}"
                number = number or getattr(error, "errno", None) or errno.EIO
                raise OSError(number, told, f"{self._url}/{name}".rstrip("/")) from error
        raise AssertionError("each attempt returns, raises or goes on")


class _Source:
    """The chunks of a file, asked for anew by each attempt; `error` is what they raised themselves."""

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
            found = self._request(start, stop) if stop <= self.nbytes else b""
            if len(found) != len(into):
                raise EOFError
            into[:] = found

    def close(self) -> None:
        pass


def _fill(file: Any, chunks: Iterable[memoryview]) -> None:
    for chunk in chunks:
        for start in range(0, len(chunk), PART_BYTES):
            file.write(chunk[start : start + PART_BYTES])


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
