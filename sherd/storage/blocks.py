"""Files with a checksum of each block, so that also a slice of a tensor is read as it was written, or not at all."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from sherd.errors import CheckpointError
from sherd.storage.place import Readable, read_exactly

_SMALL_BYTES = 64 << 10
"""Shorter chunks are copied together, or each would cost a call to the system and one to another thread."""


def in_blocks(chunks: Iterable[memoryview], block_bytes: int) -> Iterator[memoryview]:
    """Yields the same bytes in chunks that end where blocks do, or before. Short chunks are put together."""
    together, room = bytearray(), block_bytes
    for chunk in chunks:
        while len(chunk):
            part, chunk = chunk[:room], chunk[room:]
            room -= len(part)
            if len(part) < _SMALL_BYTES:
                together += part
            else:
                if together:
                    yield memoryview(together)
                    together = bytearray()
                yield part
            if together and (not room or len(together) >= _SMALL_BYTES):
                yield memoryview(together)
                together = bytearray()
            room = room or block_bytes
    if together:
        yield memoryview(together)


class Checksums:
    """The CRC-32 of each block of what passes, computed on another thread while the receiver writes it."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.nbytes = 0
        self.crc32: list[int] = []

    def passing(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yields the bytes of `chunks`; `nbytes` and `crc32` are theirs after the last."""
        self.nbytes, self.crc32 = 0, []
        with ThreadPoolExecutor(1, "sherd checksums") as thread:
            for chunk in in_blocks(chunks, self._block_bytes):
                begins = self.nbytes % self._block_bytes == 0
                summed = thread.submit(zlib.crc32, chunk, 0 if begins else self.crc32[-1])
                yield chunk
                self.crc32[len(self.crc32) - (not begins) :] = [summed.result()]
                self.nbytes += len(chunk)


class Checked:
    """A file whose blocks are compared with their checksums as they are read.

    Args:
        file: the file.
        nbytes: the length that it should have.
        crc32: the checksum of each block of `block_bytes`.

    Raises:
        CheckpointError: the file has another length; or, from `read_into`, a block is not what was written.
    """

    def __init__(self, file: Readable, nbytes: int, crc32: Sequence[int], block_bytes: int) -> None:
        if file.nbytes != nbytes:
            raise CheckpointError(f"{file.name} has {file.nbytes} of {nbytes} bytes")
        self.name, self.nbytes = file.name, nbytes
        self._file, self._crc32, self._block_bytes = file, crc32, block_bytes
        self._number = -1
        self._block = memoryview(b"")
        """Block `_number`, the last that was read in part: neighbours in a file are asked for one after the other."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
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
                    self._number = -1
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
        """Let go of the file."""
        self._file.close()
