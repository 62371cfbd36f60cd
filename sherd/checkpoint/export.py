"""An export: unsharded tensors as safetensors files, of which each rank writes some while all ranks gather.

files      | 1 | 2 |          written by ranks 0 and 1, side by side
           | 3 | 4 |          then these
gather     1a 2a 1b 2b ...    by turns, so that both ranks have something to write
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sherd.checkpoint.full_tensors import Full, FullTensors, in_buckets
from sherd.checkpoint.ranks import Ranks
from sherd.checkpoint.tensor_bytes import chunks_of, dtype_name
from sherd.storage.files import Content, write_file
from sherd.storage.places import Place

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
    return in_buckets(sources, lambda source: source.nbytes, most_bytes)


def file_names(number: int) -> list[str]:
    """Returns the names of `number` files, as transformers has them."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{number:05d}.safetensors" for index in range(number)]


def write_files(
    tensors: FullTensors, files: Mapping[str, Sequence[Source]], convert: Convert, ranks: Ranks, place: Place, what: str
) -> list[int]:
    """Write `files`, by name, into `place`, and return their sizes in bytes. All ranks must call it.

    Raises:
        CheckpointError: a rank cannot write.
        CommError: a rank has died.
    """
    names, sizes = list(files), []
    for first in range(0, len(files), ranks.size):
        wave = _Wave(tensors, list(files.values())[first : first + ranks.size], convert)
        own = first + ranks.rank
        name = names[own] if own < len(files) else None
        sizes += ranks.each(functools.partial(wave.write, ranks.rank, name, place), what)
    return [size for size in sizes if size is not None]


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


class _Wave:
    """Files that are written side by side, one by each rank, from one reading."""

    def __init__(self, tensors: FullTensors, files: Sequence[Sequence[Source]], convert: Convert) -> None:
        self._files, self._convert = files, convert
        self._reading = tensors.read(_by_turns(files), _BUCKET_BYTES)
        self._at = ""
        self._results: dict[str, torch.Tensor] = {}

    def write(self, rank: int, name: str | None, place: Place) -> int | None:
        """Write this rank's file, `name`, and return its size; without a name, only take part. Raises OSError."""
        try:
            if name is None:
                return None
            contents = {
                key: Content(
                    dtype_name(full.dtype, key), tuple(full.shape), functools.partial(self._chunks, source, key)
                )
                for source in self._files[rank]
                for key, full in source.results.items()
            }
            return write_file(place, name, contents, {"format": "pt"}).nbytes
        finally:
            for _ in self._reading:  # the other ranks need this one to the end, also if it cannot write
                pass

    def _chunks(self, source: Source, key: str) -> Iterator[memoryview]:
        """Yields the bytes of `key`, which `source` becomes. They are asked for in the order of the files."""
        while self._at != source.name:
            self._at, tensor = next(self._reading)
            if self._at == source.name:
                self._results = self._convert(source.name, tensor)
            del tensor
        yield from chunks_of(self._results.pop(key))
