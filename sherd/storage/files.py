"""The files of a checkpoint: written with a checksum of each block, and read back with their checksums compared.

Checksums are of blocks, so a slice of a tensor is verified without reading the rest of its file.
"""

from __future__ import annotations

import contextlib
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.layout.placement import Shape
from sherd.storage.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MOST_BYTES,
    Entry,
    File,
    Manifest,
    Stored,
    header_in,
    header_of,
    name_in_file,
    nbytes_of,
    parsed,
)
from sherd.storage.places import Chunks, Place, Readable, read_exactly, says_absent, unreadable

_SMALL_BYTES = 64 << 10
"""Shorter chunks are copied together, since each chunk costs a system call and a call of another thread."""
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")


# Writing


@dataclass(frozen=True, slots=True)
class Content:
    """A tensor to be written: its `dtype` as safetensors names it, its `shape`, and its bytes in `chunks`."""

    dtype: str
    shape: Shape
    chunks: Chunks


def write_file(
    place: Place,
    name: str,
    contents: Mapping[str, Content],
    metadata: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> File:
    """Write a safetensors file with `contents`, in their order, and return its description. Raises OSError."""
    header = header_of({key: (content.dtype, content.shape) for key, content in contents.items()}, metadata)
    sums = Checksums(block_bytes)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(header)
        for key, content in contents.items():
            missing = nbytes_of(content.dtype, content.shape)
            for chunk in content.chunks():
                missing -= len(chunk)
                yield chunk
            assert not missing, f"{key} has {-missing} bytes more than its shape says"

    place.write(name, lambda: sums.passing(chunks()))
    return File(name, sums.nbytes, tuple(sums.crc32))


class Checksums:
    """The CRC-32 of each block of a byte stream, computed on another thread while the receiver writes the bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.nbytes = 0
        self.crc32: list[int] = []

    def passing(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yields the bytes of `chunks`. After the last chunk, `nbytes` and `crc32` describe them."""
        self.nbytes, self.crc32 = 0, []  # a repeated write starts again
        with ThreadPoolExecutor(1, "sherd checksums") as thread:
            for chunk in in_blocks(chunks, self._block_bytes):
                begins = self.nbytes % self._block_bytes == 0
                crc32 = thread.submit(zlib.crc32, chunk, 0 if begins else self.crc32[-1])
                yield chunk
                self.crc32[len(self.crc32) - (not begins) :] = [crc32.result()]
                self.nbytes += len(chunk)


def in_blocks(chunks: Iterable[memoryview], block_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of `chunks` in chunks that never cross the end of a block. Short chunks are joined."""
    joined, room = bytearray(), block_bytes
    for chunk in chunks:
        while len(chunk):
            part, chunk = chunk[:room], chunk[room:]
            room -= len(part)
            if len(part) < _SMALL_BYTES:
                joined += part
            else:
                if joined:
                    yield memoryview(joined)
                    joined = bytearray()
                yield part
            if joined and (not room or len(joined) >= _SMALL_BYTES):
                yield memoryview(joined)
                joined = bytearray()
            room = room or block_bytes
    if joined:
        yield memoryview(joined)


# Reading


class Checked(Readable):
    """A file of `nbytes` whose blocks of `block_bytes` are compared with the checksums `crc32` as they are read.

    Raises:
        CheckpointError: the file has another length; or, from `read_into`, a block has other bytes than were written.
    """

    def __init__(self, file: Readable, nbytes: int, crc32: Sequence[int], block_bytes: int) -> None:
        if file.nbytes != nbytes:
            raise CheckpointError(f"{file.name} has {file.nbytes} of {nbytes} bytes")
        self.name, self.nbytes = file.name, nbytes
        self._file, self._crc32, self._block_bytes = file, crc32, block_bytes
        self._number = -1
        self._block = memoryview(b"")
        """Block `_number`, the last block that was read in part: the next read is often of its neighbour."""

    def read_into(self, start: int, into: memoryview) -> None:
        while len(into):
            number, behind = divmod(start, self._block_bytes)
            size = min(self._block_bytes, self.nbytes - number * self._block_bytes)
            count = min(size - behind, len(into))
            if count <= 0:
                raise CheckpointError(f"{self.name} ends at byte {self.nbytes}, before what was asked for")
            if count == size:
                self._read(number, into[:count])
            else:
                if number != self._number:
                    self._block = self._block or memoryview(bytearray(min(self._block_bytes, self.nbytes)))
                    self._number = -1  # no block is valid if the read below fails
                    self._read(number, self._block[:size])
                    self._number = number
                into[:count] = self._block[behind : behind + count]
            start, into = start + count, into[count:]

    def _read(self, number: int, into: memoryview) -> None:
        start = number * self._block_bytes
        read_exactly(self._file, start, into)
        if zlib.crc32(into) != self._crc32[number]:
            raise CheckpointError(
                f"{self.name} is not what was written: the checksum of bytes {start} to {start + len(into)} differs"
            )

    def close(self) -> None:
        self._file.close()


def checked_file(place: Place, file: File, block_bytes: int) -> Checked:
    """Returns `file` of the checkpoint in `place`, open. Raises CheckpointError if it is missing or cut short."""
    try:
        opened = place.open(file.name)
    except OSError as error:
        raise unreadable(f"{place}: {file.name} cannot be read", error) from error
    try:
        return Checked(opened, file.nbytes, file.crc32, block_bytes)
    except CheckpointError:
        opened.close()
        raise


class OpenFile:
    """One safetensors file of a checkpoint: its tensors by their names in it, and its bytes, which are checked."""

    def __init__(self, content: Checked) -> None:
        self.tensors, _ = header_in(content)
        self.bytes = content


class Opened:
    """A complete checkpoint, open for reading. Its files are opened at their first use, and closed by `close`.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.manifest: Manifest = read_manifest(place)
        self._files: dict[int, OpenFile] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].bytes.close()

    def entry(self, name: str) -> Entry:
        """Returns the tensor `name`, or the tensor with the alias `name`. Raises CheckpointError if there is none."""
        entry = self.manifest.entry(name)
        if entry is None:
            raise CheckpointError(f"{self.place} has no tensor {name}")
        return entry

    def file(self, number: int) -> OpenFile:
        """Returns file `number`. Raises CheckpointError if it is missing, torn or damaged."""
        with self._lock:
            if number not in self._files:
                file = checked_file(self.place, self.manifest.files[number], self.manifest.block_bytes)
                self._files[number] = OpenFile(file)
            return self._files[number]

    def pieces(self, name: str, part: Box | None = None) -> Iterator[tuple[OpenFile, Stored, Box]]:
        """Yields the stored parts of the tensor `name` that share elements with `part`; None: all parts.

        A stored part is its file, its place in the file, and its place in the tensor.

        Raises:
            CheckpointError: a file does not hold the part that the manifest says it does.
        """
        entry, name = self.entry(name), self.manifest.aliases.get(name, name)
        for number, box in entry.pieces(part):
            file = self.file(number)
            stored = file.tensors.get(name_in_file(name, entry.shape, box))
            if stored is None or stored.dtype != entry.dtype or stored.shape != box.sizes:
                fault = "lacks" if stored is None else f"has {stored.dtype} {stored.shape} as"
                raise CheckpointError(
                    f"{file.bytes.name} {fault} {name_in_file(name, entry.shape, box)}, "
                    f"{entry.dtype} {box.sizes} by {MANIFEST}"
                )
            yield file, stored, box


class OtherStep(CheckpointError):
    """The manifest of another step than the folder's name says: the folder was renamed or copied."""


def read_manifest(place: Place) -> Manifest:
    """Returns the manifest of the checkpoint in `place`.

    Raises:
        CheckpointError: there is none, it is damaged, or of another step than the folder's name says (`OtherStep`).
        StorageError: it cannot be read, and may be intact.
    """
    try:
        with contextlib.closing(place.open(MANIFEST)) as file:
            if file.nbytes > MOST_BYTES:
                raise CheckpointError(f"{file.name} has {file.nbytes} bytes, more than any manifest")
            raw = bytearray(file.nbytes)
            file.read_into(0, memoryview(raw))
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and not says_absent(error):
            raise unreadable(f"{place}: {MANIFEST} cannot be read", error) from error
        why = "is missing" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or "ends early"
        raise CheckpointError(f"{place} is no complete checkpoint: {MANIFEST} {why}") from None
    manifest = parsed(bytes(raw), f"{place}/{MANIFEST}")
    step = step_of(str(place).rstrip("/").rpartition("/")[2])
    if step not in (None, manifest.step):
        raise OtherStep(f"{place} has a manifest of step {manifest.step}")
    return manifest


def step_of(name: str) -> int | None:
    """Returns the step of a folder's `name`; None if it is not the name of a checkpoint's folder."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
