"""Writing one safetensors file of a checkpoint, with its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sherd.layout.placement import Shape
from sherd.storage.blocks import Checksums
from sherd.storage.manifest import BLOCK_BYTES, File
from sherd.storage.places import Chunks, Place
from sherd.storage.safetensors import header_of, nbytes_of


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
    header, _ = header_of({key: (content.dtype, content.shape) for key, content in contents.items()}, metadata)
    sums = Checksums(block_bytes)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(header)
        for key, content in contents.items():
            left = nbytes_of(content.dtype, content.shape)
            for chunk in content.chunks():
                left -= len(chunk)
                yield chunk
            assert not left, f"{key} has {-left} bytes more than its shape says"

    place.write(name, lambda: sums.passing(chunks()))
    return File(name, sums.nbytes, tuple(sums.crc32))
