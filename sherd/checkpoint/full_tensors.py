"""The unsharded tensors of a model, gathered in buckets: for a reader, or for safetensors files.

While a reader has one bucket, the next is gathered. It takes the memory of the bucket before this one, so it starts
when the reader has let go of that:

gather       | bucket 0 | bucket 1 |          | bucket 2 |
reader                  | tensors of bucket 0 | tensors of bucket 1 | ...

Over gloo, which works in the background, it takes a third bucket's memory, and starts before this one is waited for.

An export writes some files on each rank while all ranks gather:

files      | 1 | 2 |          written by ranks 0 and 1, side by side
           | 3 | 4 |          then these
gather     1a 2a 1b 2b ...    by turns, so that both ranks have something to write
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd.checkpoint.catalog import ModelTensors
from sherd.checkpoint.encoding import chunks_of, dtype_name, in_buckets
from sherd.checkpoint.ranks import Ranks
from sherd.engine import Gatherer, Line, Runtime, ShardedParameter, Unit
from sherd.errors import StateError
from sherd.storage.files import Content, write_file
from sherd.storage.places import Place
from sherd.tensor.relayout import full_of

_EXPORT_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Full:
    """An unsharded tensor as a reader gets it: its `shape` and `dtype`."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class FullTensors:
    """The parameters and buffers of a model, by name, each once under its first name, to be read between steps.

    Floating-point tensors are sent in `dtype`; None: in their own. `call` is the user's call, for messages.

    Raises:
        StateError: the model is in use, or on the meta device.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, call: str) -> None:
        own = ModelTensors(model)
        own.require_at_rest(call)
        self._call = call
        self.by_name = own.by_name
        self.records = own.records
        self.aliases = own.aliases
        self.parameters = [name for name in self.by_name if name not in own.buffers]
        self.saved_buffers = [name for name in own.buffers if name in own.saved_buffers]
        self.described = {
            name: Full(tensor.shape, tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype)
            for name, tensor in self.by_name.items()
        }
        owners = {id(record.owner): record.owner for record in self.records.values()}
        self.units = [owner for owner in owners.values() if isinstance(owner, Unit)]
        over = (Runtime.over(unit) for unit in self.units)
        self._runtimes = list({id(runtime): runtime for runtime in over if runtime is not None}.values())
        self._versions = self._versions_now()
        self._goes_by_itself = any(Gatherer.goes_by_itself(unit.mesh) for unit in self.units)

    def _versions_now(self) -> list[int]:
        return [weights.group.version for unit in self.units for weights in unit.weights]

    def read(self, names: Sequence[str], bucket_bytes: int, shown: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each of `names` with the unsharded tensor, which is the reader's own; nothing unless `shown`.

        All ranks must read the same names to their end, or stop behind the same name.

        Raises:
            StateError: a forward or backward is under way, or the shards were written since this object was made.
            CommError: a rank has died, or does not read on.
        """
        gatherer = Gatherer(min(bucket_bytes, sum(self.described[name].nbytes for name in names)))
        wanted = {name: (self.by_name[name], self.described[name].dtype) for name in names}
        buckets = (
            _Bucket({name: wanted[name] for name in members}, self.records, gatherer)
            for members in in_buckets(names, lambda name: self.described[name].nbytes, bucket_bytes)
        )
        here, ahead = None, self._started(next(buckets, None))
        following = next(buckets, None)  # it is laid out while the bucket before is gathered
        is_held = False
        try:
            while ahead is not None:
                here, ahead = ahead, None
                self._require_unwritten()
                tensors = here.tensors() if shown else iter(())
                if not self._goes_by_itself:
                    here.wait()
                    if is_held and not here.is_single:
                        # The reader's variable then refers to this tensor, and frees the last one of the bucket before.
                        yield from islice(tensors, 1)
                ahead = self._started(following)
                following = next(buckets, None)
                here.wait()
                yield from tensors
                is_held = here.ends_in_place
        finally:  # an error, or the reader stops: other ranks may stop as well, or not
            for bucket in (here, ahead):
                if bucket is not None:
                    bucket.wait()

    def _started(self, bucket: _Bucket | None) -> _Bucket | None:
        if bucket is None:
            return None
        self.require_readable()
        bucket.start()
        return bucket

    def require_readable(self) -> None:
        """Raise `StateError` if the model is in use, or its shards were written since this object was made."""
        if any(unit.lent is not None for unit in self.units) or not all(each.is_idle for each in self._runtimes):
            for unit in self.units:
                unit.require_at_rest(self._call)
        self._require_unwritten()

    def _require_unwritten(self) -> None:
        if self._versions_now() != self._versions:
            raise StateError(
                f"{self._call}: parameters were written while they were read out, so the reader would get some from "
                "before and some from after; step the optimizer when the loop has ended"
            )


class _Bucket:
    """Tensors that are gathered together, each with the dtype in which it is read."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.Tensor, torch.dtype]],
        records: Mapping[str, ShardedParameter],
        gatherer: Gatherer,
    ) -> None:
        self._tensors, self._records = tensors, records
        self.is_single, self._last = len(tensors) == 1, list(tensors)[-1]
        self._places = Line.of({name: (records[name], each[1]) for name, each in tensors.items() if name in records})
        self._gathering = gatherer.gathering(list(dict.fromkeys(line for line, _ in self._places.values())))
        self._unsharded: dict[str, torch.Tensor] = {}
        self._is_here = False

    @property
    def ends_in_place(self) -> bool:
        """True if the last tensor is a view of where it was gathered.

        While a reader holds that tensor, the bucket after the next cannot use this bucket's memory.
        """
        place = self._places.get(self._last)
        return place is not None and place[0].lands_in_place

    @torch.no_grad()
    def start(self) -> None:
        self._gathering.start()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the collectives, and gather over other axes, too. Ranks that do not read must call it, too.

        A second call does nothing.
        """
        if self._is_here:
            return
        self._gathering.wait()
        self._gathering.copy_out()
        self._is_here = True
        for name, (tensor, dtype) in self._tensors.items():
            record = self._records.get(name)
            if name in self._places:
                assert record is not None, "only parameters of units have a place"
                if record.unsharded_spec is not None or record.restored is not None:
                    part = record.on_its_mesh(self._part(name))
                    self._unsharded[name] = full_of(part) if isinstance(part, DTensor) else part
            elif isinstance(tensor, DTensor):
                self._unsharded[name] = full_of(tensor).to(dtype)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (tensor, dtype) in self._tensors.items():
            if name in self._unsharded:
                yield name, self._unsharded.pop(name)
            elif name not in self._places:
                yield name, tensor.detach().to(dtype, copy=True)
            elif name == self._last and not self.is_single and not self.ends_in_place:
                # The reader's variable holds this tensor while the next bucket is copied out of its rows. As a view it
                # would hold the memory of all tensors that were copied out here.
                yield name, self._part(name).clone()
            else:
                yield name, self._part(name)

    def _part(self, name: str) -> torch.Tensor:
        line, index = self._places[name]
        return line.part(index)


# Files

Convert = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""Turns a tensor of the model, given its name, into the tensors that files have of it, by their names in files."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the model, by `name`, and its `results`: one tensor or several, by their names in files."""

    name: str
    results: Mapping[str, Full]

    @property
    def nbytes(self) -> int:
        return sum(result.nbytes for result in self.results.values())


def file_names(number: int) -> list[str]:
    """Returns the names that transformers gives to `number` files."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{number:05d}.safetensors" for index in range(number)]


def write_files(
    tensors: FullTensors,
    files: Mapping[str, Sequence[TensorSource]],
    convert: Convert,
    ranks: Ranks,
    place: Place,
    task: str,
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
        sizes += ranks.each(functools.partial(wave.write, ranks.rank, name, place), task)
    return [size for size in sizes if size is not None]


class _Wave:
    """Files that are written side by side, one by each rank, from one reading."""

    def __init__(self, tensors: FullTensors, files: Sequence[Sequence[TensorSource]], convert: Convert) -> None:
        self._files, self._convert = files, convert
        # Sorted by the byte of its file at which a tensor begins, so that all files grow at one rate.
        begins: list[tuple[int, int, str]] = []
        for number, file in enumerate(files):
            begin = 0
            for source in file:
                begins.append((begin, number, source.name))
                begin += source.nbytes
        names = [name for _, _, name in sorted(begins, key=lambda entry: entry[:2])]
        self._reading = tensors.read(names, _EXPORT_BUCKET_BYTES)
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
            for _ in self._reading:  # to its end, even if this rank cannot write: the others gather with it
                pass

    def _chunks(self, source: TensorSource, key: str) -> Iterator[memoryview]:
        """Yields the bytes of `key`, a result of `source`. The writer asks in the order of the file."""
        while self._at != source.name:
            self._at, tensor = next(self._reading)
            if self._at == source.name:
                self._results = self._convert(source.name, tensor)
            del tensor  # its memory is the next bucket's
        yield from chunks_of(self._results.pop(key))
