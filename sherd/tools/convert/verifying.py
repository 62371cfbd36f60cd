"""Whether a checkpoint is whole: all of it is read, and compared with the checksums that its format has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sherd.errors import CheckpointError
from sherd.storage.manifest import MANIFEST, name_in_file
from sherd.tools.convert.contents import MOST_BYTES, Named, Source, chunks_of
from sherd.tools.convert.of_sherd import SherdSource

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Damage:
    """A fault of `file`, a file of a checkpoint, or of a tensor."""

    file: str
    what: str


def damages(source: Source, progress: Progress = lambda name, nbytes: None) -> Iterator[Damage]:
    """Yields what is wrong with a checkpoint.

    Of one of sherd, each block of each file is compared with its checksum, and each header with the manifest. Of other
    formats all tensors are read: a file that ends too early, or whose header is damaged, is found, but bytes that have
    changed are found only where the format has checksums.
    """
    if isinstance(source, SherdSource):
        yield from _of_sherd(source, progress)
        return
    for name in source.contents.tensors:
        try:
            for chunk in chunks_of(Named(source, name), MOST_BYTES):
                progress(name, len(chunk))
        except CheckpointError as error:
            yield Damage(name, str(error))


def _of_sherd(source: SherdSource, progress: Progress) -> Iterator[Damage]:
    opened, manifest = source.opened, source.opened.manifest
    expected: dict[int, dict[str, str]] = {number: {} for number in range(len(manifest.files))}
    for name, entry in manifest.tensors.items():
        for number, box in entry.pieces():
            piece = name_in_file(name, entry.shape, box)
            expected[number][piece] = f"{entry.dtype} {list(box.sizes)}"
    for number, file in enumerate(manifest.files):
        try:
            held = opened.file(number)
            buffer = memoryview(bytearray(manifest.block_bytes))
            for start in range(0, file.nbytes, manifest.block_bytes):
                part = buffer[: min(manifest.block_bytes, file.nbytes - start)]
                held.bytes.read_into(start, part)
                progress(file.name, len(part))
        except CheckpointError as error:
            yield Damage(file.name, str(error))
            continue
        found = {name: f"{at.dtype} {list(at.shape)}" for name, at in held.tensors.items()}
        for piece, said in expected[number].items():
            if found.get(piece) != said:
                is_ = f"has {found[piece]} as" if piece in found else "lacks"
                yield Damage(file.name, f"{is_} {piece}, {said} by {MANIFEST}")
        for piece in found.keys() - expected[number].keys():
            yield Damage(file.name, f"has {piece}, which {MANIFEST} does not name")
