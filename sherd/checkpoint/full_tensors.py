"""The tensors of a model, gathered one bucket after the other for a reader: while it has one, the next is gathered.

The next bucket takes the memory of the one before this one, so it starts when the reader has let go of that:

gather       | bucket 0 | bucket 1 |          | bucket 2 |
reader                  | tensors of bucket 0 | tensors of bucket 1 | ...

Over gloo, which works in the background, it takes a third one's, and starts before this one is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd.checkpoint.gathering import Gathering, Line, Memory, gathers_itself, goes_by_itself, line_of, way_of
from sherd.checkpoint.model_tensors import ModelTensors
from sherd.checkpoint.relayout import full_of
from sherd.engine import Runtime, ShardedParameter, Unit
from sherd.errors import StateError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Full:
    """An unsharded tensor as a reader gets it: its `shape` and `dtype`."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self.shape.numel() * self.dtype.itemsize


def in_buckets(given: Iterable[T], nbytes_of: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Returns what is `given`, in order, in lists of at most `most_bytes`, or of one element."""
    buckets: list[list[T]] = []
    room = 0
    for each in given:
        nbytes = nbytes_of(each)
        if not buckets or nbytes > room:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(each)
        room -= nbytes
    return buckets


class FullTensors:
    """The parameters and buffers of a model, by name, each once under its first name, to be read between steps.

    Args:
        model: the model, by either front end, or not sharded at all.
        dtype: the dtype of floating-point tensors; None: their own. They are sent in it.
        call: what the user has called, for messages.

    Raises:
        StateError: the model is in use, or on the meta device.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, call: str) -> None:
        found = ModelTensors(model)
        found.require_at_rest(call)
        self._call = call
        self._tensors = found.by_name
        self._records = found.records
        self.aliases = found.aliases
        self.buffers = list(found.buffers)
        self.saved_buffers = found.saved_buffers
        self.parameters = [name for name in self._tensors if name not in found.buffers]
        self.described = {name: _full(tensor, dtype) for name, tensor in self._tensors.items()}
        owners = {id(record.owner): record.owner for record in self._records.values()}
        self._units = [owner for owner in owners.values() if isinstance(owner, Unit)]
        over = (Runtime.over(unit) for unit in self._units)
        self._runtimes = list({id(each): each for each in over if each is not None}.values())
        self._versions = self._versions_now()
        self._goes_by_itself = any(goes_by_itself(unit.mesh) for unit in self._units)

    def _versions_now(self) -> list[int]:
        return [weights.group.version for unit in self._units for weights in unit.weights]

    def read(self, names: Sequence[str], bucket_bytes: int, shown: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each of `names` with the unsharded tensor, which is the reader's own. All ranks must read the same
        names to their end, or stop behind the same one. Nothing is yielded if it is not `shown`.

        Raises:
            StateError: a forward or backward is under way, or the shards have been written since the model was looked
                at.
            CommError: a rank has died, or does not read on.
        """
        memory = Memory(min(bucket_bytes, sum(self.described[name].nbytes for name in names)))
        names_of = in_buckets(names, lambda name: self.described[name].nbytes, bucket_bytes)
        buckets = (self._bucket(each, memory) for each in names_of)
        here, ahead = None, self._started(next(buckets, None))
        following = next(buckets, None)  # it is laid out while the one before is gathered
        is_held = False
        try:
            while ahead is not None:
                here, ahead = ahead, None
                self._require_unwritten()
                found = here.tensors() if shown else iter(())
                if not self._goes_by_itself:
                    here.wait()
                    if is_held and not here.is_single:
                        yield from islice(found, 1)  # then the reader holds this tensor, and not the one before
                ahead = self._started(following)
                following = next(buckets, None)
                here.wait()
                yield from found
                is_held = here.ends_in_place
        finally:  # an error, or the reader has stopped: other ranks may have stopped as well, or not
            for bucket in (here, ahead):
                if bucket is not None:
                    bucket.wait()

    def _bucket(self, names: Sequence[str], memory: Memory) -> _Bucket:
        dtypes = {name: self.described[name].dtype for name in names}
        return _Bucket({name: self._tensors[name] for name in names}, self._records, dtypes, memory)

    def _started(self, bucket: _Bucket | None) -> _Bucket | None:
        if bucket is None:
            return None
        if any(unit.lent is not None for unit in self._units) or not all(each.is_idle for each in self._runtimes):
            for unit in self._units:
                unit.require_at_rest(self._call)
        self._require_unwritten()
        bucket.start()
        return bucket

    def _require_unwritten(self) -> None:
        if self._versions_now() != self._versions:
            raise StateError(
                f"{self._call}: parameters were written while they were read out, so the reader would get some from "
                "before and some from after; step the optimizer when the loop has ended"
            )


class _Bucket:
    """Tensors that are gathered together."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        records: Mapping[str, ShardedParameter],
        dtypes: Mapping[str, torch.dtype],
        memory: Memory,
    ) -> None:
        self._tensors, self._records, self._dtypes, self._memory = tensors, records, dtypes, memory
        self._last = list(tensors)[-1]
        together: dict[object, list[str]] = {}
        for name in tensors:
            record = records.get(name)
            if record is not None and not gathers_itself(record):
                together.setdefault(line_of(record, dtypes[name]), []).append(name)
        self._places: dict[str, tuple[Line, int]] = {}
        ways: dict[object, list[Line]] = {}
        for members in together.values():
            line = Line([records[name] for name in members], dtypes[members[0]])
            ways.setdefault(way_of(line), []).append(line)
            self._places |= {name: (line, index) for index, name in enumerate(members)}
        lines = [line for of_way in ways.values() for line in of_way]
        self._in_place = [line for line in lines if line.lands_in_place]
        self._later = [line for line in lines if not line.lands_in_place]
        self._gatherings = [Gathering(of_way) for of_way in ways.values()]
        self._whole: dict[str, torch.Tensor] = {}
        self._is_here = False

    def _taken(self, lines: Sequence[Line], numels: Sequence[int]) -> list[tuple[Line, torch.Tensor]]:
        if not lines:
            return []
        dtypes, device = [line.dtype for line in lines], lines[0].mesh.device
        return list(zip(lines, self._memory.take(numels, dtypes, device), strict=True))

    def _give_memory(self, lines: Sequence[Line]) -> None:
        for line, unsharded in self._taken(lines, [line.packing.unsharded_numel for line in lines]):
            line.unsharded = unsharded

    @property
    def is_single(self) -> bool:
        """Whether it is one tensor."""
        return len(self._tensors) == 1

    @property
    def ends_in_place(self) -> bool:
        """Whether its last tensor lies where it was gathered. While a reader holds that, the memory of the bucket is
        not free for the next but one."""
        place = self._places.get(self._last)
        return place is not None and place[0].lands_in_place

    @torch.no_grad()
    def start(self) -> None:
        """Take memory, and start its collectives."""
        self._give_memory(self._in_place)
        rows = dict(self._taken(self._later, [line.packing.gathered_numel for line in self._later]))
        for gathering in self._gatherings:
            gathering.start(rows)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for its collectives, and gather what other axes shard, too: all ranks must do that, read or not. May be
        called again."""
        if self._is_here:
            return
        for gathering in self._gatherings:
            gathering.wait()
        self._give_memory(self._later)
        for gathering in self._gatherings:
            gathering.copy_out()
        self._gatherings.clear()
        self._is_here = True
        for name, tensor in self._tensors.items():
            record = self._records.get(name)
            if name in self._places:
                assert record is not None, "only parameters of units have a place"
                if record.unsharded_spec is not None or record.restored is not None:
                    part = record.as_unsharded(self._part(name))
                    self._whole[name] = full_of(part) if isinstance(part, DTensor) else part
            elif isinstance(tensor, DTensor):
                self._whole[name] = full_of(tensor).to(self._dtypes[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all of them by name."""
        for name, tensor in self._tensors.items():
            if name in self._whole:
                yield name, self._whole.pop(name)
            elif name not in self._places:
                yield name, tensor.detach().to(self._dtypes[name], copy=True)
            elif name == self._last and not self.is_single and not self.ends_in_place:
                # The reader's variable holds it while the next bucket is copied out of its rows, and would hold all of
                # what was copied out here.
                yield name, self._part(name).clone()
            else:
                yield name, self._part(name)

    def _part(self, name: str) -> torch.Tensor:
        line, index = self._places[name]
        return line.part(index)


def _full(tensor: torch.Tensor, dtype: torch.dtype | None) -> Full:
    return Full(tensor.shape, tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype)
