"""A step in chunks: optimizer state and masters that rest elsewhere come for the step of their chunk, and go.

    to the step      chunk 1   chunk 2   chunk 3   chunk 4
    the step                   chunk 1   chunk 2   chunk 3   chunk 4
    back                                 chunk 1   chunk 2   chunk 3   chunk 4

Copies in both directions are on lanes of their own, so compute waits for the first chunk only, and at most `IN_FLIGHT`
chunks have their state where the step is. Between steps `optimizer.state` has it where it rests.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import dynamo_disabled, replace_class, spec_of, swap_devices
from sherd.comm.agreement import failing_together, groups_of
from sherd.comm.streams import Handoff, streams_for
from sherd.engine import Group
from sherd.layout.extent import Extent
from sherd.on_disk import vectors_on
from sherd.optim.loaded import Rest, rest_of
from sherd.policy import Disk, Place
from sherd.schedule.moments import CHUNK_NUMEL, IN_FLIGHT
from sherd.storage.scratch import Request
from sherd.tensor.local_step import LocalStep, SteppedSpan, of_no_parameter
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, local_part, own_view
from sherd.tensor.sharded import rest_on
from sherd.tensor.state_kind import State, copy_of

Lists = Sequence[Sequence[torch.Tensor]]
"""The tensors that an optimizer steps, by parameter group."""

States = MutableMapping[torch.Tensor, State]
Run = Callable[[Lists, States], None]
"""Has the optimizer step these lists, with this state."""


class PassingPart:
    """The elements `start` to `stop` of a vector that may rest elsewhere: they come for a step, and go back.

    Attributes:
        near: the elements where the step is, once they have come.
    """

    def __init__(self, rest: Rest, vector: torch.Tensor, start: int, stop: int) -> None:
        self.disk, self._rest, self._vector, self._start, self._stop = rest.disk, rest, vector, start, stop
        self._reading: Request | None = None

    @cached_property
    def _own(self) -> torch.Tensor:
        """The elements where they rest, or a buffer in host memory for those on a disk."""
        if self.disk is None:
            return self._vector[self._start : self._stop]
        return self.disk.buffer(self._start, self._stop - self._start, self._vector.dtype, self._rest.pinned)

    def read(self) -> None:
        """Begin to read what rests on a disk."""
        if self.disk is not None:
            self._reading = self.disk.read(self._vector, self._start, self._own)

    def fetch(self) -> None:
        """Bring the elements, on the current stream."""
        if self._reading is not None:
            self._reading.wait()
        self.near = self._own.to(self._rest.near, non_blocking=True)

    def store(self, value: torch.Tensor) -> None:
        """Take `value` back, on the current stream."""
        if self._own.data_ptr() != value.data_ptr():
            self._own.copy_(value, non_blocking=True)

    def write(self, gone: Handoff) -> None:
        """Begin to write what rests on a disk, once `gone` says that it is in host memory."""
        if self.disk is not None:
            gone.wait_on_host()
            self.disk.write(self._vector, self._start, self._own)


class SteppedValues:
    """The values of a range of one group's shards that an optimizer steps: the weights, or their float32 masters.

    Weights, and low bits and carries of masters, come and go as `parts`. Masters go to a disk before their first step.
    Raises ScratchError.
    """

    def __init__(self, group: Group, extent: Extent) -> None:
        self.group, self.masters, ends = group, group.masters, (extent.start, extent.stop)
        rest = _rest_of(group, group.place.disk, "parameters")
        self.parts = [PassingPart(rest, group.shard_buffer, *ends)]
        if group.masters is None:
            return
        rest, own = _rest_of(group, group.place.masters, "masters"), (group.masters.low, group.masters.carries)
        if rest.disk is not None and not rest.has(own[0]):
            own = group.masters.rest_in(*(rest.empty(each.shape, each.dtype) for each in own))
        self.parts += PassingPart(rest, own[0], *ends), PassingPart(rest, own[1], ends[0] // 8, -(-ends[1] // 8))

    def joined(self) -> torch.Tensor:
        """Returns the values where the weights are, masters as float32."""
        weights, *bits = (each.near for each in self.parts)
        return weights if self.masters is None else self.masters.joined(weights, *bits)

    def split(self, values: torch.Tensor) -> None:
        """Split stepped masters into weights, low bits and carries."""
        if self.masters is not None:
            self.masters.split_into(values, *(each.near for each in self.parts))


class Chunk(ABC):
    """The tensors that are stepped together. Of the ranges `of_groups` the values come and go, with their masters.

    A step calls `begin`, `read`, `fetch`, `step`, `store`, `write` and `drop`, in this order.
    """

    def __init__(self, of_groups: Sequence[tuple[Group, Extent]]) -> None:
        self._of_groups = of_groups
        self._values: list[SteppedValues] = []
        self._passing: list[PassingPart] = []
        self._states: list[State] = []
        self._brought: set[int] = set()

    def begin(self) -> None:
        """Note what is to come. Raises ScratchError."""
        self._values = [SteppedValues(*each) for each in self._of_groups]
        self._passing = [part for each in self._values for part in each.parts]

    def read(self) -> None:
        """Begin to read what rests on a disk."""
        for each in self._passing:
            each.read()

    def fetch(self, async_op: bool) -> None:
        """Bring what rests elsewhere, on the current stream."""
        for each in self._passing:
            each.fetch()
        self._states = self._fetched()
        self._brought = set(map(id, self._vectors()))

    @abstractmethod
    def _fetched(self) -> list[State]:
        """Returns the states that the step gets."""

    @abstractmethod
    def step(self, run: Run) -> None:
        """Step what was brought."""

    def store(self, async_op: bool) -> None:
        """Take back to where it rests what the step has left, on the current stream."""
        for part in (part for each in self._values for part in each.parts):
            part.store(part.near)

    def write(self, gone: Handoff) -> None:
        """Begin to write what rests on a disk, once `gone` says that it is in host memory."""
        for each in self._passing:
            each.write(gone)

    def drop(self, gone: Handoff) -> None:
        """Free what was brought. `gone`: it is back."""
        if not self._brought.issuperset(map(id, self._vectors())):
            gone.wait()  # the step has made it, so it is compute's memory
        self._passing, self._states, self._values = [], [], []

    def _vectors(self) -> list[torch.Tensor]:
        return [value for state in self._states for value in state.values() if _is_vector(value)]


@dynamo_disabled  # each chunk has tensors of its own, for which a compiled step would be compiled again
def step_chunks(
    optimizer: Optimizer, chunks: Sequence[Chunk], groups: Sequence[Group], run: Run, num_moments: int = 0
) -> None:
    """Step the chunks in order, each while the next one comes and the one before goes back.

    What rests on a disk is there in the end. For the rest the optimizer's `state_dict` waits.

    Args:
        optimizer: the optimizer.
        chunks: none on a rank that has nothing of the groups.
        groups: those of which something comes, on all ranks.
        run: steps lists with their state.
        num_moments: how many vectors of state the step is about to make for each shard buffer.

    Raises:
        ScratchError: on all ranks, if a disk of one has failed.
    """
    # Where all is in host memory, no lane of a device takes part.
    devices = [group.shard_buffer.device for group in groups]
    device = next((each for each in devices if each.type != "cpu"), devices[0])
    disks = {disk.path: disk for group in groups for disk in group.place.disks}
    needed: dict[int, int] = defaultdict(int)  # by file system: folders may share one
    axes = dict.fromkeys(axis for group in groups for axis in groups_of(group.mesh)) if disks else {}
    with failing_together(axes, "optimizer state on disks"):
        for path, each in disks.items() if num_moments else ():
            of_disk = [group for group in groups if group.place.state == Disk(path)]
            sizes = [group.shard_numel * max(group.grad_dtype.itemsize, group.dtype.itemsize) for group in of_disk]
            masters = [group.masters for group in groups if group.masters and group.place.masters == Disk(path)]
            bits = [part.nbytes for own in masters for part in (own.low, own.carries) if not vectors_on(each).has(part)]
            needed[number := vectors_on(each).file_system] += num_moments * sum(sizes) + sum(bits)
            vectors_on(each).require(needed[number])
        last = _step_chunks(chunks, device, run)
        if device.type != "cpu" and last is not None:  # with nothing to step, earlier copies are still the last
            if optimizer not in _copies:
                optimizer.register_state_dict_pre_hook(_wait_for_copies)
            _copies[optimizer] = last
            for group in groups:
                if group.masters is not None:
                    group.masters.arrive_by(last)
        for each in disks.values():
            vectors_on(each).settle()


_copies: weakref.WeakKeyDictionary[Optimizer, Handoff] = weakref.WeakKeyDictionary()
"""The last copy of each optimizer's state to where it rests."""


def _wait_for_copies(optimizer: Optimizer) -> None:
    _copies[optimizer].wait_on_host()


def _step_chunks(chunks: Sequence[Chunk], device: torch.device, run: Run) -> Handoff | None:
    if not chunks:
        return None
    come, go = streams_for(device).all_reduce, streams_for(device).reduce
    came: list[Handoff] = []
    gone: list[Handoff] = []

    def fetch(number: int) -> None:
        if number < len(chunks):
            earlier = number - IN_FLIGHT
            came.append(come.run(chunks[number].fetch, drop(earlier) if earlier >= 0 else None))

    def drop(number: int) -> Handoff:
        # What the lane brought is its memory, which it may hand out again: not before the copy back has read it.
        chunks[number].drop(gone[number])
        return gone[number]

    for chunk in chunks:
        chunk.begin()
    for chunk in chunks[: IN_FLIGHT - 1]:
        chunk.read()
    come.follow_compute()
    for number in range(IN_FLIGHT - 1):
        fetch(number)
    for number, chunk in enumerate(chunks):
        for ahead in chunks[number + IN_FLIGHT - 1 : number + IN_FLIGHT]:
            ahead.read()
        came[number].wait()
        chunk.step(run)
        go.follow_compute()
        gone.append(go.run(chunk.store))
        if number:
            chunks[number - 1].write(gone[number - 1])
        fetch(number + IN_FLIGHT - 1)
    chunks[-1].write(gone[-1])
    for number in range(max(0, len(chunks) - IN_FLIGHT), len(chunks)):
        drop(number)
    return come.run(lambda async_op: None, gone[-1])


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _rest_of(group: Group, place: Place | None, what: str) -> Rest:
    return Rest(place, group.shard_buffer.device, group.place.pinned, f"{what} of {group.name}")


# Ranges of shard buffers


class SpanState:
    """The state of one span, which begins at `offset` in the shard buffer, where it rests."""

    def __init__(self, span: SteppedSpan, group: Group, states: States) -> None:
        self.span, self._group, self._states = span, group, states
        self.offset = int(span.flat.storage_offset() - span.buffer.storage_offset())
        self._rest = _rest_of(group, group.place.state, "state")
        self.before: State = {}

    def begin(self) -> None:
        """Note the state before the step. What was loaded, or made with the optimizer, goes to where it rests."""
        state, group = self._states.get(self.span.flat, {}), self._group
        for key, value in state.items():
            if _is_vector(value):
                # An optimizer makes state for parameters in bfloat16, and steps float32.
                is_narrow = group.masters is not None and value.dtype is group.dtype
                state[key] = self._rest.placed(value, torch.float32 if is_narrow else None)
        # Parts of a span are stepped one after another, each with its own count of steps.
        self.before = {key: value if _is_vector(value) else copy_of(value) for key, value in state.items()}

    def part(self, key: str, dtype: torch.dtype, start: int, stop: int) -> PassingPart:
        """Returns the part of a vector of state; the vector is made if there is none."""
        kept = self._states[self.span.flat]
        if key not in kept:
            kept[key] = self._rest.empty(self.span.flat.shape, dtype)
        return PassingPart(self._rest, kept[key], start, stop)

    def put(self, key: str, value: Any) -> None:
        """Keep a number that a step has left of a part."""
        kept = self._states[self.span.flat]
        if isinstance(kept.get(key), torch.Tensor):
            kept[key].copy_(value)
        else:
            kept[key] = value


class RangeChunk(Chunk):
    """The parts of one group's spans in a range of the shard buffer, for an element-wise optimizer.

    Args:
        group: the group.
        extent: the range; it begins at a multiple of 8.
        spans: all spans of the group.
        num_lists: the number of the optimizer's parameter groups.
    """

    def __init__(self, group: Group, extent: Extent, spans: Sequence[SpanState], num_lists: int) -> None:
        super().__init__([(group, extent)])
        self._start, self._num_lists = extent.start, num_lists
        self._ranges: list[tuple[SpanState, int, int]] = []  # the range in the span, of each span
        self._parts: list[dict[str, PassingPart]] = []
        for each in spans:
            start = max(0, extent.start - each.offset)
            stop = min(each.span.flat.numel(), extent.stop - each.offset)
            if start < stop:
                self._ranges.append((each, start, stop))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def begin(self) -> None:
        super().begin()
        for each, start, _ in self._ranges:
            if start == 0:
                each.begin()
        self._parts = [
            {key: each.part(key, value.dtype, *ends) for key, value in each.before.items() if _is_vector(value)}
            for each, *ends in self._ranges
        ]
        self._passing += [part for of_span in self._parts for part in of_span.values()]

    def _fetched(self) -> list[State]:
        return [
            {key: parts[key].near if key in parts else copy_of(value) for key, value in each.before.items()}
            for (each, _, _), parts in zip(self._ranges, self._parts, strict=True)
        ]

    def drop(self, gone: Handoff) -> None:
        super().drop(gone)
        self._parts = []

    def step(self, run: Run) -> None:
        (of_range,) = self._values
        values = of_range.joined()
        lists: list[list[torch.Tensor]] = [[] for _ in range(self._num_lists)]
        lent: States = defaultdict(dict)
        for (each, start, stop), state in zip(self._ranges, self._states, strict=True):
            begin = each.offset - self._start
            part = nn.Parameter(values[begin + start : begin + stop].detach())
            assert each.span.flat.grad is not None, "only shards with a gradient are in a span"
            part.grad = each.span.flat.grad[start:stop]
            lists[each.span.group_index].append(part)
            lent[part] = state
        run(lists, lent)
        of_range.split(values)

    def store(self, async_op: bool) -> None:
        super().store(async_op)
        for (each, *ends), state, parts in zip(self._ranges, self._states, self._parts, strict=True):
            for key, value in state.items():
                if not _is_vector(value):
                    each.put(key, value)
                    continue
                if key not in parts:
                    parts[key] = each.part(key, value.dtype, *ends)
                    self._passing.append(parts[key])
                parts[key].store(value)


def chunks_of(local: LocalStep, by_group: Sequence[tuple[Group, Sequence[SteppedSpan]]]) -> list[Chunk]:
    """Returns the chunks of a local step: ranges of the groups whose state comes, then all that is where it is stepped.

    Spans without elements, of shards that are empty on this rank, count their steps there too.
    """
    chunks: list[Chunk] = []
    in_ranges: set[int] = set()
    for group, spans in by_group:
        states = [SpanState(span, group, local.state) for span in spans if group.is_brought and span.flat.numel()]
        starts = range(0, group.shard_numel, CHUNK_NUMEL) if states else ()
        extents = [Extent(start, min(CHUNK_NUMEL, group.shard_numel - start)) for start in starts]
        of_group = [RangeChunk(group, extent, states, len(local.parts)) for extent in extents]
        chunks += [each for each in of_group if each]
        in_ranges.update(id(each.span.flat) for each in states)
    rest = [[each for each in own if id(each) not in in_ranges] for own in local.parts]
    return [*chunks, Shards(rest, local.state)] if any(rest) else chunks


# Shards


class Shards(Chunk):
    """Parameters themselves, or parts of them, which are stepped as they are; masters as float32 shards meanwhile.

    Args:
        lists: what the optimizer steps.
        resting: the optimizer's state.
        groups: those with masters, or some of them.
    """

    def __init__(self, lists: Lists, resting: States, groups: Sequence[Group] = ()) -> None:
        super().__init__([(group, Extent(0, group.shard_numel)) for group in groups if group.masters is not None])
        self._lists, self._resting = lists, resting
        self._stepped = [each for own in lists for each in own]
        self._state: dict[Any, State] = defaultdict(dict)
        self._swapped = ExitStack()

    def _fetched(self) -> list[State]:
        self._state |= of_no_parameter(self._resting)
        for each in self._stepped:
            if each in self._resting:
                # Also that of a span without elements, which may be a part of state that rests elsewhere.
                near = Rest(None, local_part(each).device, False)
                self._state[each] = {
                    key: near.placed(value, async_op=True) if _is_vector(value) else value
                    for key, value in self._resting[each].items()
                }
        return self._of_stepped()

    def _of_stepped(self) -> list[State]:
        return [self._state[each] for each in self._stepped if each in self._state]

    def step(self, run: Run) -> None:
        with self._swapped:
            self._swap()
            run(self._lists, self._state)
        self._states = self._of_stepped()

    def _swap(self) -> None:
        for each in self._values:
            self._swapped.enter_context(_stepped_as_masters(each))

    def around_closure(self, closure: Callable[[], object]) -> Callable[[], object]:
        """Returns `closure`, inside of which the shards are shards: it computes a loss and new gradients."""

        def with_shards() -> object:
            self._swapped.close()
            for masters in (each.masters for each in self._values if each.masters is not None):
                masters.note_step()
            loss = closure()
            self._swap()
            return loss

        return with_shards

    def store(self, async_op: bool) -> None:
        super().store(async_op)
        for each in (each for each in self._stepped if self._state.get(each)):
            rest, kept = rest_of(each), self._resting.setdefault(each, {})
            now = {
                key: rest.placed(value, None, kept.get(key), async_op=True) if _is_vector(value) else value
                for key, value in self._state[each].items()
            }
            # The same dict, to which a step that is undone brings back what it has.
            kept.clear()
            kept.update(now)
        self._resting.update(of_no_parameter(self._state))

    def drop(self, gone: Handoff) -> None:
        super().drop(gone)
        self._state.clear()  # the optimizer may know it: as above in `Stepper.step`


@contextmanager
def _stepped_as_masters(masters: SteppedValues) -> Iterator[None]:
    """Within this context the shards of a group, the same objects, are its masters in float32."""
    values = masters.joined()
    swapped: list[tuple[DTensor, DTensor, torch.Tensor]] = []
    try:
        for each, extent in masters.group.stepped():
            shard: Any = each
            part = own_view(values[extent.start : extent.stop]).view(local_part(shard).shape)
            other = as_dtensor(part, in_dtype(spec_of(shard), torch.float32))
            other.requires_grad_(shard.requires_grad)
            gradient, local = shard.grad, local_part(shard)
            _exchange(shard, other, part)
            shard.grad = None if gradient is None else gradient.to(torch.float32)
            swapped.append((shard, other, local))
        yield
        masters.split(values)
    finally:
        for shard, other, local in swapped:
            is_dropped = shard.grad is None
            _exchange(shard, other, local)
            if is_dropped:
                shard.grad = None


def _exchange(shard: DTensor, other: DTensor, local: torch.Tensor) -> None:
    """Give `shard` the dtype and the gradient of `other`, and `local` as its memory."""
    swap_devices(shard, other)
    replace_class(shard, type(shard), in_dtype(spec_of(shard), local.dtype))
    rest_on(shard, local)
