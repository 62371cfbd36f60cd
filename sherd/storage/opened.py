"""A checkpoint that is open for reading: its manifest, and the bytes of its tensors."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.storage.blocks import Checked
from sherd.storage.manifest import MANIFEST, MOST_BYTES, Entry, Manifest, name_in_file, parsed
from sherd.storage.place import says_absent, unreadable
from sherd.storage.places import Place
from sherd.storage.safetensors import Stored, header_length
from sherd.storage.safetensors import parsed as parsed_header

_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")


class OpenFile:
    """One safetensors file of a checkpoint: its tensors by their names in it, and its bytes, which are checked."""

    def __init__(self, bytes_of: Checked) -> None:
        begin = bytearray(8)
        if bytes_of.nbytes >= len(begin):
            bytes_of.read_into(0, memoryview(begin))
        header = bytearray(header_length(bytes(begin), bytes_of.nbytes, bytes_of.name))
        bytes_of.read_into(len(begin), memoryview(header))
        self.tensors, self.metadata = parsed_header(bytes(header), bytes_of.nbytes, bytes_of.name)
        self.bytes = bytes_of


class Opened:
    """A whole checkpoint. Its files are opened when they are needed, and closed by `close`, or at a `with`'s end.

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
        """Close all files."""
        while self._files:
            self._files.popitem()[1].bytes.close()

    def entry(self, name: str) -> Entry:
        """Returns the tensor `name`, or the one it is an alias of. Raises CheckpointError if there is none."""
        found = self.manifest.entry(name)
        if found is None:
            raise CheckpointError(f"{self.place} has no tensor {name}")
        return found

    def file(self, number: int) -> OpenFile:
        """Returns file `number`. Raises CheckpointError if it is missing, torn or damaged."""
        with self._lock:
            if number not in self._files:
                of = self.manifest.files[number]
                try:
                    file = self.place.open(of.name)
                except OSError as error:
                    raise unreadable(f"{self.place}: {of.name} cannot be read", error) from error
                self._files[number] = OpenFile(Checked(file, of.nbytes, of.crc32, self.manifest.block_bytes))
            return self._files[number]

    def pieces(self, name: str, part: Box | None = None) -> Iterator[tuple[OpenFile, Stored, Box]]:
        """Yields the pieces of the tensor `name` that share elements with `part` (None: all): the file, the place in
        it, and the piece's own place in the tensor.

        Raises:
            CheckpointError: a file does not hold the piece that the manifest says it does.
        """
        entry, name = self.entry(name), self.manifest.aliases.get(name, name)
        for number, box in entry.pieces(part):
            file = self.file(number)
            stored = file.tensors.get(name_in_file(name, entry.shape, box))
            if stored is None or stored.dtype != entry.dtype or stored.shape != box.sizes:
                found = "lacks" if stored is None else f"has {stored.dtype} {stored.shape} as"
                raise CheckpointError(
                    f"{file.bytes.name} {found} {name_in_file(name, entry.shape, box)}, "
                    f"{entry.dtype} {box.sizes} by {MANIFEST}"
                )
            yield file, stored, box


def read_manifest(place: Place) -> Manifest:
    """Returns the manifest of the checkpoint in `place`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another step than the folder's name says.
        StorageError: it cannot be read, and may be whole.
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
        raise CheckpointError(f"{place} is no whole checkpoint: {MANIFEST} {why}") from None
    manifest = parsed(bytes(raw), f"{place}/{MANIFEST}")
    step = step_of(str(place).rstrip("/").rpartition("/")[2])
    if step not in (None, manifest.step):
        raise CheckpointError(f"{place} has a manifest of step {manifest.step}")
    return manifest


def step_of(name: str) -> int | None:
    """Returns the step whose checkpoint is in a folder of this `name`; None if it is no such name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
