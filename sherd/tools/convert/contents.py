"""The contents of a checkpoint of any format, in the terms of sherd's own, and how it is read and written by parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from sherd.checkpoint.tensor_bytes import DTYPES, memory_of
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, spans, whole
from sherd.layout.placement import Shape
from sherd.storage.places import Disk, Readable
from sherd.storage.safetensors import nbytes_of

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
        """The bytes of all elements."""
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
        """The bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def of_kind(self, kind: str) -> list[str]:
        """Returns the names of the items of `kind`: "module", "optimizer" or "state"."""
        return [name for name, value in self.values.items() if value.get("kind") == kind]

    def of_item(self, item: str) -> dict[str, Spec]:
        """Returns the tensors of `item`, by their names inside of the item."""
        begin = f"{item}/"
        return {name[len(begin) :]: spec for name, spec in self.tensors.items() if name.startswith(begin)}


class Lazy(Protocol):
    """A tensor that is read by parts."""

    @property
    def spec(self) -> Spec:
        """The tensor's dtype and shape."""

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part` of the tensor.

        `target` is in host memory, and has the shape of `part` and the tensor's dtype. Reading takes about `most_bytes`
        of memory besides.
        """


class Source:
    """A checkpoint that is open for reading.

    Args:
        format: the name of the format.
        tensors: the tensors.
        rest: the other contents of the checkpoint, whose own `tensors` are not used.
        close: closes all files.
        notes: what a user should know of this checkpoint, in sentences.
        pieces: by name, the number of pieces of tensors; None: each is one.
    """

    def __init__(
        self,
        format: str,
        tensors: Mapping[str, Lazy],
        rest: Contents,
        close: Callable[[], None] = lambda: None,
        notes: Sequence[str] = (),
        pieces: Mapping[str, int] | None = None,
    ) -> None:
        self.format, self.close, self._tensors = format, close, tensors
        specs = {name: lazy.spec for name, lazy in tensors.items()}
        self.contents = Contents(specs, rest.aliases, rest.values, rest.step, rest.user)
        self._notes = list(notes)
        self._pieces = {name: number for name, number in (pieces or {}).items() if number > 1}

    def read_into(self, name: str, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part` of the tensor `name`, as `Lazy.read_into` does.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self._tensors[self.contents.aliases.get(name, name)].read_into(part, target, most_bytes)

    def notes(self) -> list[str]:
        """Returns what a user should know of this checkpoint, in sentences."""
        return self._notes

    def pieces(self) -> Mapping[str, int]:
        """Returns by name the number of pieces of each tensor that lies in several."""
        return self._pieces


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
    box, dtype = whole(of.spec.shape), DTYPES[of.spec.dtype]
    if box.numel:
        for span in spans(box, box, max(most_bytes // dtype.itemsize, 1)):
            target = torch.empty(span.box.sizes, dtype=dtype)
            of.read_into(span.box, target, most_bytes)
            yield memory_of(target)


@dataclass(frozen=True)
class NamedTensor:
    """The tensor `name` of `source`."""

    source: Source
    name: str

    @property
    def spec(self) -> Spec:
        """The tensor's dtype and shape."""
        contents = self.source.contents
        return contents.tensors[contents.aliases.get(self.name, self.name)]

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        self.source.read_into(self.name, part, target, most_bytes)


@dataclass(frozen=True)
class Pieced:
    """A tensor in pieces, each with the box of its elements in the whole tensor."""

    spec: Spec
    pieces: tuple[tuple[Box, Lazy], ...]

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        for box, piece in self.pieces:
            shared = box.intersect(part)
            if shared is not None:
                offsets = tuple(at - first for at, first in zip(shared.offsets, box.offsets, strict=True))
                piece.read_into(Box(offsets, shared.sizes), target[shared.within(part)], most_bytes)


@dataclass(frozen=True)
class TensorPart:
    """The part `box` of a tensor."""

    of: Lazy
    box: Box

    @property
    def spec(self) -> Spec:
        """The tensor's dtype and shape."""
        return replace(self.of.spec, shape=self.box.sizes)

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        offsets = tuple(first + at for first, at in zip(self.box.offsets, part.offsets, strict=True))
        self.of.read_into(Box(offsets, part.sizes), target, most_bytes)


@dataclass(frozen=True)
class Reshaped:
    """A tensor of `shape` whose elements, row by row, are those of a vector."""

    vector: Lazy
    shape: Shape

    @property
    def spec(self) -> Spec:
        """The tensor's dtype and shape."""
        return replace(self.vector.spec, shape=self.shape)

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`."""
        dtype = DTYPES[self.spec.dtype]
        for span in spans(whole(self.shape), part, max(most_bytes // dtype.itemsize, 1)) if part.numel else ():
            read = torch.empty(span.box.numel, dtype=dtype)
            self.vector.read_into(Box((span.start,), (span.box.numel,)), read, most_bytes)
            target[span.wanted.within(part)] = read.view(span.box.sizes)[span.wanted.within(span.box)]


def path_inside(folder: Path, name: object, where: str) -> Path:
    """Returns the path of the file `name` of a checkpoint. Raises CheckpointError if it is not in `folder`."""
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(f"{where} names the file {str(name)[:100]!r}, which is not in its folder")
    return folder / name


def open_file(path: Path) -> Readable:
    """Returns the file at `path`, open. Raises CheckpointError if it cannot be read."""
    try:
        return Disk(path.parent).open(path.name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
