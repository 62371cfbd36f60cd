"""The contents of a checkpoint of any format, in the terms of sherd's own, and how it is read and written by parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sherd.checkpoint.encoding import DTYPES
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, spans, whole
from sherd.layout.placement import Shape
from sherd.storage.manifest import nbytes_of
from sherd.storage.places import DiskPlace, Readable
from sherd.tensor.ragged import memory_of

MODEL, OPTIMIZER = "model", "optimizer"
"""The names of items in checkpoints of formats that have no names for items."""

MOST_BYTES = 64 << 20
"""The most bytes of a tensor that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's `dtype`, as safetensors names it, and its `shape`."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Args:
        tensors: all tensors: "model/NAME" of a module, "optimizer/NAME/KEY" of an optimizer's state of a parameter.
        aliases: other names of tensors (tied weights).
        values: everything else, by item, as in a manifest of sherd.
        step: the number of steps before the checkpoint was saved; None if that is not known.
        user: what the user added to a checkpoint of sherd.
    """

    tensors: Mapping[str, Spec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    user: Any = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def of_kind(self, kind: str) -> list[str]:
        """Returns the names of the items of `kind`: "module", "optimizer" or "state"."""
        return [name for name, value in self.values.items() if value.get("kind") == kind]

    def of_item(self, item: str) -> dict[str, Spec]:
        """Returns the tensors of `item`, by their names inside of the item."""
        begin = f"{item}/"
        return {name[len(begin) :]: spec for name, spec in self.tensors.items() if name.startswith(begin)}


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A tensor that is read by parts.

    Args:
        spec: its dtype and shape.
        read_into: `read_into(part, target, most_bytes)` fills `target` with `part` of the tensor. `target` is in host
            memory, and has the shape of `part` and the tensor's dtype. Reading takes about `most_bytes` of memory
            in addition.
        memory: equal for two names of one tensor. None: it is not known where the tensor is.
        num_pieces: the number of parts in which a checkpoint has it.
    """

    spec: Spec
    read_into: Callable[[Box, torch.Tensor, int], object]
    memory: object = None
    num_pieces: int = 1

    def part(self, part: Box, most_bytes: int) -> torch.Tensor:
        """Returns `part` of the tensor, in memory of its own."""
        target = torch.empty(part.sizes, dtype=DTYPES[self.spec.dtype])
        self.read_into(part, target, most_bytes)
        return target


class Source:
    """A checkpoint that is open for reading, until `close` closes its files.

    `rest` has all contents but `tensors`. `notes` say what a user should know of this checkpoint, in sentences.
    """

    def __init__(
        self,
        format: str,
        tensors: Mapping[str, Lazy],
        rest: Contents,
        close: Callable[[], None] = lambda: None,
        notes: Sequence[str] = (),
    ) -> None:
        self.format, self.close, self._tensors = format, close, tensors
        specs = {name: lazy.spec for name, lazy in tensors.items()}
        self.contents = Contents(specs, rest.aliases, rest.values, rest.step, rest.user)
        self._notes = list(notes)

    def tensor(self, name: str) -> Lazy:
        """Returns the tensor `name`. Reading it raises CheckpointError if a file is missing or damaged."""
        return self._tensors[self.contents.aliases.get(name, name)]

    def notes(self) -> list[str]:
        return self._notes

    def pieces(self) -> Mapping[str, int]:
        """Returns by name the number of parts of each tensor that is in several."""
        return {name: lazy.num_pieces for name, lazy in self._tensors.items() if lazy.num_pieces > 1}


Read = Callable[[str], Iterator[memoryview]]
"""Returns the bytes of a tensor, row by row. Each chunk is valid until the next one is asked for."""

Sink = Callable[[Path, Contents, Read], Sequence[str]]
"""Writes a checkpoint to a path that does not exist yet, one tensor after the other.

Returns what was left out, in sentences.
"""

Progress = Callable[[str, int], None]
"""Is called with the name of a tensor or file, and the number of its bytes that were just read."""


def chunks_of(of: Lazy, most_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, row by row, at most `most_bytes` at a time."""
    box = whole(of.spec.shape)
    for span in spans(box, box, max(most_bytes // DTYPES[of.spec.dtype].itemsize, 1)) if box.numel else ():
        yield memory_of(of.part(span.box, most_bytes))


def in_pieces(spec: Spec, pieces: Sequence[tuple[Box, Lazy]], memory: object = None) -> Lazy:
    """Returns a tensor in parts, each with the box of its elements in the tensor."""

    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        for box, piece in pieces:
            shared = box.intersect(part)
            if shared is not None:
                offsets = tuple(at - first for at, first in zip(shared.offsets, box.offsets, strict=True))
                piece.read_into(Box(offsets, shared.sizes), target[shared.within(part)], most_bytes)

    return Lazy(spec, read_into, memory, len(pieces))


def path_inside(folder: Path, name: object, where: str) -> Path:
    """Returns the path of the file `name` of a checkpoint. Raises CheckpointError if it is not in `folder`."""
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(f"{where} names the file {str(name)[:100]!r}, which is not in its folder")
    return folder / name


def open_file(path: Path) -> Readable:
    """Returns the file at `path`, open. Raises CheckpointError if it cannot be read."""
    try:
        return DiskPlace(path.parent).open(path.name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
