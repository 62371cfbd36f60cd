"""An export: unsharded tensors as safetensors files, of which each rank writes some while all ranks gather.

    files      | 1 | 2 |          written by ranks 0 and 1, side by side
               | 3 | 4 |          then these
    gather     1a 2a 1b 2b ...    by turns, so that both ranks have something to write
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sherd.checkpoint.full_tensors import Full, FullTensors
from sherd.checkpoint.ranks import Ranks
from sherd.checkpoint.tensor_bytes import chunks_of, dtype_name
from sherd.storage.places import Place
from sherd.storage.writing import Content, write_file

Convert = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""Returns what a tensor of the model is in files, by name there."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model, by `name`, and what it is in files: one tensor, or several, by their names there."""

    name: str
    results: Mapping[str, Full]

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in files."""
        return sum(result.nbytes for result in self.results.values())


def split(sources: Sequence[Source], most_bytes: int) -> list[list[Source]]:
    """Returns `sources` by file, in order: at most `most_bytes` in each, or one tensor."""
    files: list[list[Source]] = []
    room = 0
    for source in sources:
        if not files or source.nbytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(source)
        room -= source.nbytes
    return files


def file_names(number: int) -> list[str]:
    """Returns the names of `number` files, as transformers has them."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{number:05d}.safetensors" for index in range(number)]


def write_files(
    tensors: FullTensors, files: Sequence[Sequence[Source]], convert: Convert, ranks: Ranks, place: Place, what: str
) -> list[int]:
    """Write `files` into `place`, and return their sizes in bytes. All ranks must call it.

    Raises:
        CheckpointError: a rank cannot write.
        CommError: a rank has died.
    """
    names, sizes = file_names(len(files)), []
    for first in range(0, len(files), ranks.size):
        wave = files[first : first + ranks.size]
        reading = tensors.read(_by_turns(wave), _BUCKET_BYTES)

        def write() -> int | None:
            try:
                if ranks.rank >= len(wave):
                    return None
                contents = _contents(wave[ranks.rank], _Reader(reading, convert))
                return write_file(place, names[first + ranks.rank], contents, {"format": "pt"}).nbytes
            finally:
                for _ in reading:  # the other ranks need this one to the end, also if it cannot write
                    pass

        sizes += [size for size in ranks.each(write, what) if size is not None]
    return sizes


_BUCKET_BYTES = 64 << 20


def _by_turns(wave: Sequence[Sequence[Source]]) -> list[str]:
    """Returns the names of all sources of the files, such that the files grow alike."""
    begins: list[tuple[int, int, str]] = []
    for number, file in enumerate(wave):
        begin = 0
        for source in file:
            begins.append((begin, number, source.name))
            begin += source.nbytes
    return [name for _, _, name in sorted(begins, key=lambda each: each[:2])]


def _contents(file: Sequence[Source], reader: _Reader) -> dict[str, Content]:
    return {
        name: Content(dtype_name(full.dtype, name), tuple(full.shape), reader.chunks(source.name, name))
        for source in file
        for name, full in source.results.items()
    }


class _Reader:
    """The tensors of one file, among those that are gathered for all."""

    def __init__(self, reading: Iterator[tuple[str, torch.Tensor]], convert: Convert) -> None:
        self._reading, self._convert = reading, convert
        self._at = ""
        self._results: dict[str, torch.Tensor] = {}

    def chunks(self, source: str, name: str) -> Callable[[], Iterator[memoryview]]:
        """Returns the function for the bytes of `name`, which `source` becomes. They are asked for in order."""

        def found() -> Iterator[memoryview]:
            while self._at != source:
                self._at, tensor = next(self._reading)
                if self._at == source:
                    self._results = self._convert(source, tensor)
                del tensor
            yield from chunks_of(self._results.pop(name))

        return found
